#include "textflag.h"

// Entry of the process: sigaction(SIGCHLD, SIG_IGN), then pause for ever.
TEXT ·start(SB), NOSPLIT|NOFRAME, $0
	SUBQ $64, SP
	MOVQ $1, 0(SP)  // SIG_IGN
	MOVQ $0, 8(SP)  // flags
	MOVQ $0, 16(SP) // restorer
	MOVQ $0, 24(SP) // mask
	MOVL $13, AX    // rt_sigaction
	MOVL $17, DI    // SIGCHLD
	MOVQ SP, SI
	XORL DX, DX
	MOVL $8, R10
	SYSCALL

forever:
	MOVL $34, AX // pause
	SYSCALL
	JMP  forever
