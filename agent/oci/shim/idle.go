package shim

import (
	"strconv"
	"syscall"
)

// idleAfter is the time without an event, in milliseconds, after which a shim counts as idle.
const idleAfter = 1000

// program is the list of read-only mappings of this process's own binary, as address ranges.
type program [][2]uintptr

// ownProgram returns the mappings of this process; nil if they cannot be read.
func ownProgram() program {
	fd, err := syscall.Open("/proc/self/maps", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	var buf [4096]byte
	n, err := syscall.Read(fd, buf[:])
	if err != nil {
		return nil
	}
	return parseMaps(buf[:n], "keelson-shim")
}

// parseMaps parses /proc/self/maps and returns the read-only mappings of files with this name. The
// last line may be truncated.
func parseMaps(text []byte, name string) program {
	var p program
	for start, i := 0, 0; i < len(text); i++ {
		if text[i] != '\n' {
			continue
		}
		line := string(text[start:i])
		start = i + 1
		dash, space := indexByte(line, '-'), indexByte(line, ' ')
		if dash < 0 || space < dash || space+5 > len(line) || line[space+1] != 'r' || line[space+2] != '-' ||
			line[space+4] != 'p' || len(line) < len(name)+1 || line[len(line)-len(name)-1:] != "/"+name {
			continue
		}
		start, err1 := strconv.ParseUint(line[:dash], 16, 64)
		end, err2 := strconv.ParseUint(line[dash+1:space], 16, 64)
		if err1 == nil && err2 == nil && start < end {
			p = append(p, [2]uintptr{uintptr(start), uintptr(end)})
		}
	}
	return p
}

func indexByte(text string, c byte) int {
	for i := range len(text) {
		if text[i] == c {
			return i
		}
	}
	return -1
}

// dropPages drops the pages of the shim's program from this process to save memory. The pages stay
// in the page cache, which all shims of the node share. An event needs only few of the pages that
// the start of the shim has touched.
func (p program) dropPages() {
	for _, m := range p {
		const dontNeed = 4
		_, _, _ = syscall.RawSyscall(syscall.SYS_MADVISE, m[0], m[1]-m[0], dontNeed)
	}
}

// waitEvents is epoll_wait. After idleAfter milliseconds without an event, it drops the program's
// pages and continues to wait.
func (l *loop) waitEvents(events []syscall.EpollEvent) (int, error) {
	n, err := syscall.EpollWait(l.epoll, events, idleAfter)
	if n == 0 && err == nil {
		l.program.dropPages()
		return syscall.EpollWait(l.epoll, events, -1)
	}
	return n, err
}
