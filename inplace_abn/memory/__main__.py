from inplace_abn.memory.command import main

main()
