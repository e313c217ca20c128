// Coefficients for curves.h, which says what of, and math.h. Written by scripts/fit_inverses.py.
#pragma once

namespace inplace_abn::fits {

// The normal distribution's mass beyond x is exp(-x^2 / 2) * P(x) / Q(x), for 0 <= x <= 13.
struct NormalTail {
  // error 2e-09
  static constexpr double p[] = {0.5, 0.4154312874, 0.1670219378, 0.03532799512, 0.003365038376, -6.447454575e-09};
  static constexpr double q[] = {1, 1.628747221, 1.133594852, 0.4267284878, 0.08857840752, 0.008433957828};
};

struct Silu {
  static constexpr double y_min = -1.27846454276107379511, z_min = -0.278464542761073795109;

  struct Fine {  // error 4e-07
    static constexpr int degree = 7;
    static constexpr double linear = 17.32, centre = 0.53125;
    static constexpr double right_p[] = {6.237781457,   1.825696685,  -1.27400992,     1.903880539,
                                         -0.2282803169, 0.3003006153, -0.007742975476, 0.05699691326};
    static constexpr double right_q[] = {3.130580822,  4.205381642,   -0.03692175017, -0.2931759159,
                                         0.8880046156, 0.01733345134, 0.02897655224,  0.05504315368};
    static constexpr double left_p[] = {-1.278464543,  -1.384886409,  -0.7858766593,  -0.5169510336,
                                        -0.2587105301, -0.1000130663, -0.04071427074, -0.01658213777};
    static constexpr double left_q[] = {1,
                                        -0.1675192404,
                                        0.3755775929,
                                        -0.01220950528,
                                        0.03882094997,
                                        0.01661639761,
                                        -4.268585629e-07,
                                        2.158454169e-09};
  };
  struct Coarse {  // error 5e-05
    static constexpr int degree = 4;
    static constexpr double linear = 12.43, centre = 0.0;
    static constexpr double right_p[] = {4.591121477, -2.644954333, 1.392779338, -0.4730001444, 0.1729057836};
    static constexpr double right_q[] = {1, 1.796105891, -0.6778424513, -0.04213537596, 0.1391809541};
    static constexpr double left_p[] = {-1.278464543, -1.721421223, -1.070607842, -0.4453644585, -0.2060126869};
    static constexpr double left_q[] = {1, 0.09714866851, 0.2549429983, -0.003897235031, 0.0001272351956};
  };
};

struct Gelu {
  static constexpr double y_min = -0.751791524693564457458, z_min = -0.169971207479903661694;

  struct Fine {  // error 2e-07
    static constexpr int degree = 7;
    static constexpr double linear = 5.419, centre = 1.1875;
    static constexpr double right_p[] = {1.146046997,  -1.346203604, 1.792669321,  0.2397161526,
                                         0.2902974787, 0.5334425972, 0.1452050271, 0.05192736035};
    static constexpr double right_q[] = {1.046179072,    -0.8464351046, 0.7926403861, 1.193028378,
                                         -0.03316539853, 0.3834784606,  0.3027416378, 0.01462776502};
    static constexpr double left_p[] = {-0.7517915247, -2.518607171, -3.869436531,  -3.554968148,
                                        -2.124338391,  -0.833352351, -0.2014275181, -0.02372130945};
    static constexpr double left_q[] = {
        1, 2.169499375, 2.271222792, 1.441356463, 0.5821159808, 0.1424305611, 0.01677350892, -2.236747401e-10};
  };
  struct Coarse {  // error 7e-05
    static constexpr int degree = 4;
    static constexpr double linear = 4.465, centre = 0.0;
    static constexpr double right_p[] = {4.423052209, -4.545898609, 2.467529085, -0.9580765468, 0.3051675189};
    static constexpr double right_q[] = {1, 1.839920473, -1.980507919, 0.411559154, 0.1480518268};
    static constexpr double left_p[] = {-0.7517915247, -1.675931482, -1.567612441, -0.7513043438, -0.166948522};
    static constexpr double left_q[] = {1, 1.048621099, 0.5326120696, 0.117941674, 3.647692132e-06};
  };
};

struct GeluTanh {
  static constexpr double y_min = -0.752461422071016258488, z_min = -0.170040750571254050639;

  struct Fine {  // error 2e-07
    static constexpr int degree = 7;
    static constexpr double linear = 5.06, centre = 1.421875;
    static constexpr double right_p[] = {0.8320244628, -0.5745850745, 1.824521909,  0.4838613211,
                                         0.750723132,  0.5976687427,  0.1637132832, 0.03995302136};
    static constexpr double right_q[] = {0.8084481414, -0.4172674068, 1.395922655,  1.073454577,
                                         0.3662305143, 0.6324152103,  0.2538078714, 0.004848922364};
    static constexpr double left_p[] = {-0.7524614221, -5.690564051,  -5.526065588,  -1.879064323,
                                        -0.6209513687, -0.4752528798, -0.1055098276, 0.00299370172};
    static constexpr double left_q[] = {
        1, 6.381273993, -0.5095242406, 1.163575532, 0.1144122634, 0.1159361594, -0.001009077486, -5.733467006e-05};
  };
  struct Coarse {  // error 9e-05
    static constexpr int degree = 4;
    static constexpr double linear = 4.281, centre = 0.0;
    static constexpr double right_p[] = {4.425182902, -4.753029905, 2.602743153, -0.9953360092, 0.2940770498};
    static constexpr double right_q[] = {1, 1.79560918, -2.090366973, 0.4985055571, 0.1159206128};
    static constexpr double left_p[] = {-0.7524614221, -1.19008651, -0.6726083144, -0.1579813418, -0.04844802946};
    static constexpr double left_q[] = {1, 0.3997071596, 0.1070927859, 0.04194740442, 0.0009987441712};
  };
};

struct Mish {
  static constexpr double y_min = -1.19243121451549521214, z_min = -0.308843413017250406629;

  struct Fine {  // error 1e-07
    static constexpr int degree = 8;
    static constexpr double linear = 9.007, centre = 1.140625;
    static constexpr double right_p[] = {1.248175832,  -0.1921969366, 1.751650377,  0.7680636734, 1.196920183,
                                         0.7734877187, 0.4867389352,  0.1832455664, 0.03845784657};
    static constexpr double right_q[] = {1.105717281,  0.2625673493, 1.116061297,  1.27717039,   0.9420431294,
                                         0.8532198294, 0.4729019704, 0.1839581571, 0.03854928913};
    static constexpr double left_p[] = {-1.192431215,  -1.460377163,   -0.9755104094, -0.6017145211,   -0.272934466,
                                        -0.1179674522, -0.05105500978, -0.0217274686, -0.0003450817973};
    static constexpr double left_q[] = {1,
                                        -0.05097142342,
                                        0.3872231329,
                                        -0.0128227343,
                                        0.04585976583,
                                        0.02175949386,
                                        0.0003443587241,
                                        7.936664547e-09,
                                        -2.856989227e-11};
  };
  struct Coarse {  // error 7e-05
    static constexpr int degree = 4;
    static constexpr double linear = 6.56, centre = 0.0;
    static constexpr double right_p[] = {3.86095725, -3.402627546, 1.950679117, -0.761109799, 0.2841279107};
    static constexpr double right_q[] = {1, 1.413468481, -1.099641625, 0.09965781857, 0.1928835374};
    static constexpr double left_p[] = {-1.192431215, -1.914159585, -1.406168317, -0.6023452999, -0.2156474735};
    static constexpr double left_q[] = {1, 0.3305807448, 0.2523575577, -0.002885355739, 9.355396394e-05};
  };
};

}  // namespace inplace_abn::fits
