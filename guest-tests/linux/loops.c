/* A program without libc that executes a known number of instructions, all of them here:
 * 2,000,004, of which 1,000,000 are conditional branches, 999,999 of these taken.
 * It ends with status 0. */
__asm__(
	".globl _start\n"
	"_start:\n"
	"	mov $1000000, %ecx\n"
	"loops_hot:\n"
	"	dec %ecx\n"
	"	jnz loops_hot\n"
	"	mov $60, %eax\n"
	"	xor %edi, %edi\n"
	"	syscall\n");
