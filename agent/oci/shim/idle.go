package shim

import (
	"strconv"
	"syscall"
)

// idleAfter is how many milliseconds without an event pass before a shim counts as idle.
const idleAfter = 1000

// program are the parts of this process' memory that are the program itself and are never written.
type program [][2]uintptr

// ownProgram finds them; without them there is nothing to let go of.
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

// parseMaps takes the mappings of a file of that name that cannot be written from the text of /proc/self/maps, of which
// the last line may be cut.
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

// letGo gives the program's pages back to the page cache, where all shims of the node share them. What runs next
// brings in what it needs, which is little: a start and its helpers run through most of it, an event does not.
func (p program) letGo() {
	for _, m := range p {
		const dontNeed = 4
		_, _, _ = syscall.RawSyscall(syscall.SYS_MADVISE, m[0], m[1]-m[0], dontNeed)
	}
}

// wait is epoll_wait. Once nothing has happened for a while it lets go of what an idle shim does not need.
func (l *loop) wait(events []syscall.EpollEvent) (int, error) {
	n, err := syscall.EpollWait(l.epoll, events, idleAfter)
	if n == 0 && err == nil {
		l.program.letGo()
		return syscall.EpollWait(l.epoll, events, -1)
	}
	return n, err
}
