package shim

import (
	"strconv"
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// container is one container of the pod. state is 0 while keelson-oci creates it.
type container struct {
	l       *loop
	req     wire.Create
	state   int64
	pid     int
	started int64
	exit    wire.Exited
	log     logFile

	out      [2]int // read ends of stdout and stderr; with a terminal its master and -1
	stdin    int    // write end of stdin, or the terminal's master
	fifo     int
	onStart  func(error)
	attached []*attachment
}

// helperFiles returns the descriptors of a keelson-oci process. 0 to 2 are its own; it writes its
// response to 1. 3 to 5 are the container's streams, and 6 is the socket to which a terminal is
// sent.
func (l *loop) helperFiles(answer int, in, out, errs, console int) []uintptr {
	f := []uintptr{uintptr(l.devNull), uintptr(answer), 2, uintptr(in), uintptr(out), uintptr(errs)}
	if console >= 0 {
		f = append(f, uintptr(console))
	}
	return f
}

func helperArgs(verb, bundle string, tty bool) []string {
	if tty {
		return []string{verb, bundle, "tty"}
	}
	return []string{verb, bundle}
}

// runHelper runs keelson-oci. It calls done with the reported PID and the response, or with the
// error.
func (l *loop) runHelper(oci string, args []string, files func(answer int) []uintptr, done func(pid int, answer string, err error)) {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		done(0, "", err)
		return
	}
	pid, err := syscall.ForkExec(oci, append([]string{"keelson-oci"}, args...), &syscall.ProcAttr{
		Dir: "/", Env: []string{"GOMAXPROCS=2", "GOGC=off", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"},
		Files: files(p[1]),
		// If the shim dies, the result is not needed: kill the helper.
		Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	})
	syscall.Close(p[1])
	if err != nil {
		syscall.Close(p[0])
		done(0, "", failure(describe("start "+oci, err)))
		return
	}
	l.helpers++
	l.own(pid, func(int, int64) {})
	l.expect()
	l.collect(p[0], func(text string) {
		pid, answer, err := parseAnswer(text)
		done(pid, answer, err)
		l.helperDone()
	})
}

// parseAnswer parses the output of keelson-oci: the PID (0 on failure) in the first line, then JSON
// or the error.
func parseAnswer(text string) (pid int, answer string, err error) {
	for i := range len(text) {
		if text[i] != '\n' {
			continue
		}
		pid, err = strconv.Atoi(text[:i])
		if err != nil || pid < 0 {
			break
		}
		if pid == 0 {
			return 0, "", failure(text[i+1:])
		}
		return pid, text[i+1:], nil
	}
	if text == "" {
		return 0, "", failure("keelson-oci ended without an answer")
	}
	return 0, "", failure("keelson-oci answered: " + text)
}

func (l *loop) create(c *conn, id uint32, m wire.Create) {
	if l.find(m.Container) != nil {
		c.started(id, 0, "", failure("container "+m.Container+" exists"))
		return
	}
	t := &container{l: l, req: m, out: [2]int{-1, -1}, stdin: -1, fifo: -1,
		log: logFile{path: m.Log, fd: -1, limit: m.LogSize, files: int(m.LogFiles)}}
	if err := t.log.reopen(); err != nil {
		c.started(id, 0, "", err)
		return
	}
	theirs, console, err := t.openStreams()
	if err != nil {
		t.release()
		c.started(id, 0, "", failure(describe("open streams", err)))
		return
	}
	l.containers = append(l.containers, t)
	l.runHelper(m.OCI, helperArgs("create", m.Bundle, m.TTY), func(answer int) []uintptr {
		return l.helperFiles(answer, theirs[0], theirs[1], theirs[2], theirs[3])
	}, func(pid int, answer string, err error) {
		if err == nil && m.TTY {
			err = t.receiveTerminal(console)
		}
		if console >= 0 {
			syscall.Close(console)
		}
		if err == nil {
			err = t.watchStreams()
		}
		if err != nil {
			if pid > 0 {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			t.release()
			l.remove(t)
			c.started(id, 0, "", err)
			return
		}
		t.pid, t.state = pid, wire.StateCreated
		l.own(pid, t.ended)
		c.started(id, pid, answer, nil)
	})
	for _, fd := range theirs {
		if fd >= 0 && fd != l.devNull {
			syscall.Close(fd)
		}
	}
}

func (l *loop) remove(t *container) {
	for i, other := range l.containers {
		if other == t {
			l.containers = append(l.containers[:i], l.containers[i+1:]...)
			return
		}
	}
}

// openStreams creates the container's pipes, or the socket pair on which the terminal arrives
// (console). theirs are the container's ends: stdin, stdout, stderr, console socket.
func (t *container) openStreams() (theirs [4]int, console int, err error) {
	null := t.l.devNull
	theirs, console = [4]int{null, null, null, -1}, -1
	if t.req.TTY {
		p, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			return theirs, -1, err
		}
		theirs[3] = p[1]
		return theirs, p[0], nil
	}
	var p [2]int
	for i := range t.out {
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			return theirs, -1, err
		}
		t.out[i], theirs[1+i] = p[0], p[1]
	}
	if t.req.Stdin {
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
			return theirs, -1, err
		}
		t.stdin, theirs[0] = p[1], p[0]
	}
	return theirs, -1, nil
}

// receiveTerminal receives the terminal's master from the container's init. keelson-oci has exited,
// so the master is either already in the socket or will never arrive.
func (t *container) receiveTerminal(console int) error {
	oob := make([]byte, syscall.CmsgSpace(4))
	_, oobn, _, _, err := syscall.Recvmsg(console, t.l.scratch, oob, syscall.MSG_CMSG_CLOEXEC|syscall.MSG_DONTWAIT)
	if err != nil {
		return failure(describe("receive the terminal", err))
	}
	msgs, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		return failure("no terminal was sent")
	}
	fds, err := syscall.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return failure("no terminal was sent")
	}
	t.out[0] = fds[0]
	if t.req.Stdin {
		t.stdin = fds[0]
	}
	return nil
}

func (t *container) watchStreams() error {
	for i, fd := range t.out {
		if fd < 0 {
			continue
		}
		if err := syscall.SetNonblock(fd, true); err != nil {
			return err
		}
		if err := t.l.add(fd, syscall.EPOLLIN, func(uint32) { t.readable(i) }); err != nil {
			return err
		}
	}
	if t.stdin >= 0 && t.stdin != t.out[0] {
		return syscall.SetNonblock(t.stdin, true)
	}
	return nil
}

// readable copies output of stream i to the log and to the attachments. more reports whether there
// may be more output now.
func (t *container) readable(i int) (more bool) {
	n, err := syscall.Read(t.out[i], t.l.scratch)
	switch {
	case err == syscall.EINTR:
		return true
	case err == syscall.EAGAIN:
		return false
	case err != nil || n <= 0: // EIO: no process has the terminal open
		t.log.flush(i)
		if t.stdin == t.out[i] {
			t.stdin = -1
		}
		t.l.drop(&t.out[i])
		if t.state == wire.StateExited && t.out[0] < 0 && t.out[1] < 0 {
			t.detachAll()
		}
		return false
	}
	t.log.write(i, t.l.scratch[:n])
	t.spread(i, t.l.scratch[:n])
	return true
}

func (l *loop) start(c *conn, id uint32, m *wire.Start) {
	t := l.find(m.Container)
	switch {
	case t == nil || t.state == 0:
		c.done(id, failure("container "+m.Container+" is not known"))
		return
	case t.state == wire.StateRunning:
		c.done(id, nil)
		return
	case t.state == wire.StateExited:
		c.done(id, failure("container "+m.Container+" has ended"))
		return
	case t.onStart != nil:
		c.done(id, failure("container "+m.Container+" is being started"))
		return
	}
	// The container's init waits until its FIFO is opened, writes one byte, and executes the
	// program.
	fd, err := syscall.Open(m.Fifo, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		c.done(id, failure(describe("open "+m.Fifo, err)))
		return
	}
	t.fifo = fd
	t.onStart = func(err error) {
		t.onStart = nil
		l.drop(&t.fifo)
		if err == nil {
			_ = syscall.Unlink(m.Fifo)
			t.state, t.started = wire.StateRunning, now()
		}
		c.done(id, err)
	}
	err = l.add(fd, syscall.EPOLLIN, func(uint32) {
		n, err := syscall.Read(fd, l.scratch[:16])
		switch {
		case n > 0:
			t.onStart(nil)
		case err != syscall.EAGAIN && err != syscall.EINTR:
			t.onStart(failure("container " + m.Container + " ended before it was started"))
		}
	})
	if err != nil {
		t.onStart(err)
	}
}

// ended records how the container's first process ended. Its pending output is read first.
// Descendants in a shared PID namespace may keep the streams open longer.
func (t *container) ended(code int, at int64) {
	if t.onStart != nil {
		// It may have been started and have ended meanwhile: then there is a byte in the FIFO.
		if n, _ := syscall.Read(t.fifo, t.l.scratch[:16]); n > 0 {
			t.onStart(nil)
		} else {
			t.onStart(failure("container ended before it was started, code " + itoa(code)))
		}
	}
	for i := range t.out {
		for t.out[i] >= 0 && t.l.handlers[t.out[i]] != nil && t.readable(i) {
		}
	}
	t.state = wire.StateExited
	t.exit = wire.Exited{Container: t.req.Container, Code: int64(code), Time: at, OOM: t.oomKilled()}
	if t.stdin >= 0 && t.stdin != t.out[0] {
		t.l.drop(&t.stdin)
	}
	record := itoa(code) + " " + strconv.FormatInt(at, 10) + " " + strconv.FormatInt(t.started, 10)
	if t.exit.OOM {
		record += " oom"
	}
	if err := replaceFile(t.req.ExitFile, record+"\n", false); err != nil {
		complain(describe("record the end in "+t.req.ExitFile, err))
	}
	if t.out[0] < 0 && t.out[1] < 0 {
		t.detachAll()
	}
	if t.req.EndFile != "" {
		// A connected agent syncs the file itself, so this loop need not wait for the disk.
		if err := replaceFile(t.req.EndFile, record+"\n"+t.req.EndNote, !t.l.heard()); err != nil {
			complain(describe("record the end in "+t.req.EndFile, err))
		}
	}
	t.l.announce(&t.exit)
}

// oomKilled reports whether the kernel killed a process of the container for lack of memory.
// memory.oom_control (v1) and memory.events (v2) both have a line "oom_kill N".
func (t *container) oomKilled() bool {
	if t.req.OOMFile == "" {
		return false
	}
	b, err := readFile(t.req.OOMFile)
	return err == nil && oomCount(b) > 0
}

func oomCount(b []byte) int {
	const key = "oom_kill "
	for len(b) > 0 {
		line := b
		for i := range b {
			if b[i] == '\n' {
				line = b[:i]
				break
			}
		}
		if b = b[len(line):]; len(b) > 0 {
			b = b[1:]
		}
		if len(line) > len(key) && string(line[:len(key)]) == key {
			n, _ := strconv.Atoi(string(line[len(key):]))
			return n
		}
	}
	return 0
}

// release closes all open descriptors of the container.
func (t *container) release() {
	t.detachAll()
	if t.stdin == t.out[0] {
		t.stdin = -1
	}
	t.l.drop(&t.stdin)
	t.l.drop(&t.out[0])
	t.l.drop(&t.out[1])
	t.l.drop(&t.fifo)
	t.log.close()
}

func (l *loop) resize(m *wire.Resize) error {
	t := l.find(m.Container)
	if t == nil || !t.req.TTY || t.out[0] < 0 {
		return nil
	}
	if err := setSize(t.out[0], m.Width, m.Height); err != nil {
		return failure(describe("resize the terminal", err))
	}
	return nil
}

func (l *loop) exec(c *conn, id uint32, m *wire.Exec) {
	fds, err := c.take(m.Files())
	if err != nil {
		c.started(id, 0, "", err)
		return
	}
	if t := l.find(m.Container); t == nil || t.state != wire.StateRunning {
		closeAll(fds)
		c.started(id, 0, "", failure("container "+m.Container+" is not running"))
		return
	}
	l.runHelper(m.OCI, helperArgs("exec", m.Bundle, m.TTY), func(answer int) []uintptr {
		if m.TTY {
			return l.helperFiles(answer, l.devNull, l.devNull, l.devNull, fds[0])
		}
		return l.helperFiles(answer, fds[0], fds[1], fds[2], -1)
	}, func(pid int, answer string, err error) {
		if err == nil {
			if c.execs == nil {
				c.execs = map[uint32]int{}
			}
			c.execs[id] = pid
		}
		c.started(id, pid, answer, err)
		if err != nil {
			return
		}
		if c.closed {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		l.own(pid, func(code int, at int64) {
			delete(c.execs, id)
			e := wire.Exited{Code: int64(code), Time: at}
			c.send(wire.KindExited, id, &e)
		})
	})
	closeAll(fds)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}

// maxComplaints bounds the shim's own log, which is on a tmpfs of the host.
const maxComplaints = 64 << 10

// complain writes a line to the shim's own log. A full log is truncated first.
func complain(s string) {
	var st syscall.Stat_t
	if err := syscall.Fstat(2, &st); err == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Size > maxComplaints {
		_ = syscall.Ftruncate(2, 0)
	}
	_, _ = syscall.Write(2, []byte("keelson-shim: "+s[:min(len(s), 1024)]+"\n"))
}
