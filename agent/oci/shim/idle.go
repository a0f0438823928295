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
		dash, space := find(line, '-'), find(line, ' ')
		if dash < 0 || space < dash || space+5 > len(line) || line[space+1] != 'r' || line[space+2] != '-' ||
			line[space+4] != 'p' || len(line) < len(name)+1 || line[len(line)-len(name)-1:] != "/"+name {
			continue
		}
		from, err1 := strconv.ParseUint(line[:dash], 16, 64)
		to, err2 := strconv.ParseUint(line[dash+1:space], 16, 64)
		if err1 == nil && err2 == nil && from < to {
			p = append(p, [2]uintptr{uintptr(from), uintptr(to)})
		}
	}
	return p
}

func find(s string, c byte) int {
	for i := range len(s) {
		if s[i] == c {
			return i
		}
	}
	return -1
}

// letGo drops the program's pages from this process. They stay in the page cache, which all shims
// of the node share. An event needs few of them again; the start and the helpers had touched most.
func (p program) letGo() {
	for _, m := range p {
		const dontNeed = 4
		_, _, _ = syscall.RawSyscall(syscall.SYS_MADVISE, m[0], m[1]-m[0], dontNeed)
	}
}

// wait is epoll_wait. After idleAfter without an event, it drops the program's pages.
func (l *loop) wait(events []syscall.EpollEvent) (int, error) {
	n, err := syscall.EpollWait(l.epoll, events, idleAfter)
	if n == 0 && err == nil {
		l.program.letGo()
		return syscall.EpollWait(l.epoll, events, -1)
	}
	return n, err
}
