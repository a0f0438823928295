package shim

import (
	"strconv"
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// container is one container of the pod. state is 0 while keelson-oci creates it.
type container struct {
	loop    *loop
	request wire.Create
	state   int64
	pid     int
	started int64
	exit    wire.Exited
	log     logFile

	out         [2]int // read ends of stdout and stderr; with a terminal its master and -1
	stdin       int    // write end of stdin, or the terminal's master
	fifo        int
	finishStart func(error)
	attached    []*attachment
}

// helperFiles returns the descriptors that a keelson-oci process inherits. 0 to 2 are its own
// standard streams; it writes its response to 1, which is answer. 3 to 5 are the container's
// streams, and 6 is the socket that receives a terminal.
func (l *loop) helperFiles(answer int, stdin, out, errs, console int) []uintptr {
	f := []uintptr{uintptr(l.devNull), uintptr(answer), 2, uintptr(stdin), uintptr(out), uintptr(errs)}
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

// runHelper starts keelson-oci and returns. files returns the descriptors of the process, given the
// one for its response. When the response is complete, runHelper calls done with the reported PID
// and the response, or with the error.
func (l *loop) runHelper(oci string, args []string, files func(answer int) []uintptr,
	done func(pid int, answer string, err error)) {
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
		done(0, "", failure(describeError("start "+oci, err)))
		return
	}
	l.helpers++
	l.registerChild(pid, func(int, int64) {})
	l.expectChild()
	l.collectOutput(p[0], func(text string) {
		pid, answer, err := parseAnswer(text)
		done(pid, answer, err)
		l.finishHelper()
	})
}

// parseAnswer parses the output of keelson-oci. The first line is the PID of the started process,
// or 0 after a failure. The rest is the JSON response, or the error text, which parseAnswer returns
// as an error.
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
		return 0, "", failure("keelson-oci exited without a response")
	}
	return 0, "", failure("unexpected output of keelson-oci: " + text)
}

func (l *loop) createContainer(c *conn, id uint32, request wire.Create) {
	if l.findContainer(request.Container) != nil {
		c.sendStarted(id, 0, "", failure("container "+request.Container+" exists"))
		return
	}
	t := &container{loop: l, request: request, out: [2]int{-1, -1}, stdin: -1, fifo: -1,
		log: logFile{path: request.Log, fd: -1, limit: request.LogSize, files: int(request.LogFiles)}}
	if err := t.log.reopenFile(); err != nil {
		c.sendStarted(id, 0, "", err)
		return
	}
	theirs, console, err := t.openStreams()
	if err != nil {
		t.closeDescriptors()
		c.sendStarted(id, 0, "", failure(describeError("open streams", err)))
		return
	}
	l.containers = append(l.containers, t)
	l.runHelper(request.OCI, helperArgs("create", request.Bundle, request.TTY), func(answer int) []uintptr {
		return l.helperFiles(answer, theirs[0], theirs[1], theirs[2], theirs[3])
	}, func(pid int, answer string, err error) {
		if err == nil && request.TTY {
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
			t.closeDescriptors()
			l.removeContainer(t)
			c.sendStarted(id, 0, "", err)
			return
		}
		t.pid, t.state = pid, wire.StateCreated
		l.registerChild(pid, t.recordEnd)
		c.sendStarted(id, pid, answer, nil)
	})
	for _, fd := range theirs {
		if fd >= 0 && fd != l.devNull {
			syscall.Close(fd)
		}
	}
}

func (l *loop) removeContainer(t *container) {
	for i, other := range l.containers {
		if other == t {
			l.containers = append(l.containers[:i], l.containers[i+1:]...)
			return
		}
	}
}

// openStreams creates the container's pipes or, for a terminal, a socket pair on which the shim
// receives the terminal; console is the shim's end. theirs are the container's ends: stdin, stdout,
// stderr, console socket.
func (t *container) openStreams() (theirs [4]int, console int, err error) {
	null := t.loop.devNull
	theirs, console = [4]int{null, null, null, -1}, -1
	if t.request.TTY {
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
	if t.request.Stdin {
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
	_, oobn, _, _, err := syscall.Recvmsg(console, t.loop.scratch, oob, syscall.MSG_CMSG_CLOEXEC|syscall.MSG_DONTWAIT)
	if err != nil {
		return failure(describeError("receive the terminal", err))
	}
	msgs, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		return failure("no terminal was received")
	}
	fds, err := syscall.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return failure("no terminal was received")
	}
	t.out[0] = fds[0]
	if t.request.Stdin {
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
		if err := t.loop.watchDescriptor(fd, syscall.EPOLLIN, func(uint32) { t.readOutput(i) }); err != nil {
			return err
		}
	}
	if t.stdin >= 0 && t.stdin != t.out[0] {
		return syscall.SetNonblock(t.stdin, true)
	}
	return nil
}

// readOutput reads once from stream i (0 is stdout, 1 is stderr), and copies the output to the log
// and to the attachments. more reports whether there may be more output to read now.
func (t *container) readOutput(i int) (more bool) {
	n, err := syscall.Read(t.out[i], t.loop.scratch)
	switch {
	case err == syscall.EINTR:
		return true
	case err == syscall.EAGAIN:
		return false
	case err != nil || n <= 0: // EIO: no process has the terminal open
		t.log.flushPartialLine(i)
		if t.stdin == t.out[i] {
			t.stdin = -1
		}
		t.loop.closeDescriptor(&t.out[i])
		if t.state == wire.StateExited && t.out[0] < 0 && t.out[1] < 0 {
			t.detachAll()
		}
		return false
	}
	t.log.logOutput(i, t.loop.scratch[:n])
	t.writeToClients(i, t.loop.scratch[:n])
	return true
}

func (l *loop) startContainer(c *conn, id uint32, request *wire.Start) {
	t := l.findContainer(request.Container)
	switch {
	case t == nil || t.state == 0:
		c.sendDone(id, failure("container "+request.Container+" does not exist"))
		return
	case t.state == wire.StateRunning:
		c.sendDone(id, nil)
		return
	case t.state == wire.StateExited:
		c.sendDone(id, failure("container "+request.Container+" has ended"))
		return
	case t.finishStart != nil:
		c.sendDone(id, failure("container "+request.Container+" is being started"))
		return
	}
	// The container's init waits until its FIFO is opened, writes one byte, and executes the
	// program.
	fd, err := syscall.Open(request.Fifo, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		c.sendDone(id, failure(describeError("open "+request.Fifo, err)))
		return
	}
	t.fifo = fd
	t.finishStart = func(err error) {
		t.finishStart = nil
		l.closeDescriptor(&t.fifo)
		if err == nil {
			_ = syscall.Unlink(request.Fifo)
			t.state, t.started = wire.StateRunning, unixNano()
		}
		c.sendDone(id, err)
	}
	err = l.watchDescriptor(fd, syscall.EPOLLIN, func(uint32) {
		n, err := syscall.Read(fd, l.scratch[:16])
		switch {
		case n > 0:
			t.finishStart(nil)
		case err != syscall.EAGAIN && err != syscall.EINTR:
			t.finishStart(failure("container " + request.Container + " ended before it was started"))
		}
	})
	if err != nil {
		t.finishStart(err)
	}
}

// recordEnd handles the exit of the container's first process. It reads the pending output, writes
// the exit record to disk and reports the exit to the agents. Descendants in a shared PID namespace
// may keep the streams open longer.
func (t *container) recordEnd(code int, finished int64) {
	if t.finishStart != nil {
		// It may have been started and have ended meanwhile: then there is a byte in the FIFO.
		if n, _ := syscall.Read(t.fifo, t.loop.scratch[:16]); n > 0 {
			t.finishStart(nil)
		} else {
			t.finishStart(failure("container ended before it was started, code " + formatInt(code)))
		}
	}
	for i := range t.out {
		for t.out[i] >= 0 && t.loop.handlers[t.out[i]] != nil && t.readOutput(i) {
		}
	}
	t.state = wire.StateExited
	t.exit = wire.Exited{Container: t.request.Container, Code: int64(code), Time: finished, OOM: t.oomKilled()}
	if t.stdin >= 0 && t.stdin != t.out[0] {
		t.loop.closeDescriptor(&t.stdin)
	}
	record := formatInt(code) + " " + strconv.FormatInt(finished, 10) + " " + strconv.FormatInt(t.started, 10)
	if t.exit.OOM {
		record += " oom"
	}
	if err := replaceFile(t.request.ExitFile, record+"\n", false); err != nil {
		writeComplaint(describeError("write the exit record "+t.request.ExitFile, err))
	}
	if t.out[0] < 0 && t.out[1] < 0 {
		t.detachAll()
	}
	if t.request.EndFile != "" {
		// A connected agent syncs the file itself, so this loop need not wait for the disk.
		if err := replaceFile(t.request.EndFile, record+"\n"+t.request.EndNote, !t.loop.hasGreetedAgent()); err != nil {
			writeComplaint(describeError("write the exit record "+t.request.EndFile, err))
		}
	}
	t.loop.announceExit(&t.exit)
}

// oomKilled reports whether the kernel killed a process of the container for lack of memory.
// memory.oom_control (v1) and memory.events (v2) both have a line "oom_kill N".
func (t *container) oomKilled() bool {
	if t.request.OOMFile == "" {
		return false
	}
	b, err := readFile(t.request.OOMFile)
	return err == nil && oomCount(b) > 0
}

func oomCount(data []byte) int {
	const key = "oom_kill "
	for len(data) > 0 {
		line := data
		for i := range data {
			if data[i] == '\n' {
				line = data[:i]
				break
			}
		}
		if data = data[len(line):]; len(data) > 0 {
			data = data[1:]
		}
		if len(line) > len(key) && string(line[:len(key)]) == key {
			n, _ := strconv.Atoi(string(line[len(key):]))
			return n
		}
	}
	return 0
}

// closeDescriptors closes all open descriptors of the container.
func (t *container) closeDescriptors() {
	t.detachAll()
	if t.stdin == t.out[0] {
		t.stdin = -1
	}
	t.loop.closeDescriptor(&t.stdin)
	t.loop.closeDescriptor(&t.out[0])
	t.loop.closeDescriptor(&t.out[1])
	t.loop.closeDescriptor(&t.fifo)
	t.log.closeFile()
}

func (l *loop) resizeTerminal(request *wire.Resize) error {
	t := l.findContainer(request.Container)
	if t == nil || !t.request.TTY || t.out[0] < 0 {
		return nil
	}
	if err := setSize(t.out[0], request.Width, request.Height); err != nil {
		return failure(describeError("resize the terminal", err))
	}
	return nil
}

func (l *loop) execCommand(c *conn, id uint32, request *wire.Exec) {
	fds, err := c.takeFiles(request.Files())
	if err != nil {
		c.sendStarted(id, 0, "", err)
		return
	}
	if t := l.findContainer(request.Container); t == nil || t.state != wire.StateRunning {
		closeAll(fds)
		c.sendStarted(id, 0, "", failure("container "+request.Container+" is not running"))
		return
	}
	l.runHelper(request.OCI, helperArgs("exec", request.Bundle, request.TTY), func(answer int) []uintptr {
		if request.TTY {
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
		c.sendStarted(id, pid, answer, err)
		if err != nil {
			return
		}
		if c.closed {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		l.registerChild(pid, func(code int, at int64) {
			delete(c.execs, id)
			e := wire.Exited{Code: int64(code), Time: at}
			c.sendMessage(wire.KindExited, id, &e)
		})
	})
	closeAll(fds)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		syscall.Close(fd)
	}
}

// maxComplaints is the maximum size of the shim's own log, which is on a tmpfs of the host.
const maxComplaints = 64 << 10

// writeComplaint writes an error message to the shim's own log. A full log is truncated first.
func writeComplaint(text string) {
	var st syscall.Stat_t
	if err := syscall.Fstat(2, &st); err == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG &&
		st.Size > maxComplaints {
		_ = syscall.Ftruncate(2, 0)
	}
	_, _ = syscall.Write(2, []byte("keelson-shim: "+text[:min(len(text), 1024)]+"\n"))
}
