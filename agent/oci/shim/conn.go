package shim

import (
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// conn is the connection of one agent.
type conn struct {
	loop   *loop
	fd     int
	in     []byte
	out    []byte
	files  []int // received descriptors that no message has used yet
	closed bool

	greeted bool           // Hello was received: send the exits of processes to this agent
	version int64          // protocol version of this connection
	execs   map[uint32]int // request ID → PID of its command
}

func (l *loop) acceptConnections(listen int) {
	for {
		fd, _, err := syscall.Accept4(listen, syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK)
		if err != nil {
			return
		}
		c := &conn{loop: l, fd: fd}
		if err := l.watchDescriptor(fd, syscall.EPOLLIN, c.handleEvents); err != nil {
			syscall.Close(fd)
			return
		}
		l.conns = append(l.conns, c)
	}
}

func (c *conn) handleEvents(events uint32) {
	if events&syscall.EPOLLOUT != 0 {
		c.flushOutput()
	}
	if events&(syscall.EPOLLIN|syscall.EPOLLHUP|syscall.EPOLLERR) != 0 && !c.closed {
		c.receiveFrames()
	}
}

func (c *conn) receiveFrames() {
	oob := make([]byte, syscall.CmsgSpace(4*4))
	n, oobn, _, _, err := syscall.Recvmsg(c.fd, c.loop.scratch, oob, syscall.MSG_CMSG_CLOEXEC)
	if err == syscall.EAGAIN || err == syscall.EINTR {
		return
	}
	if err != nil || n == 0 {
		c.closeConnection()
		return
	}
	if oobn > 0 {
		if msgs, err := syscall.ParseSocketControlMessage(oob[:oobn]); err == nil {
			for i := range msgs {
				fds, _ := syscall.ParseUnixRights(&msgs[i])
				c.files = append(c.files, fds...)
			}
		}
	}
	c.in = append(c.in, c.loop.scratch[:n]...)
	for !c.closed {
		f, used, err := wire.NextFrame(c.in)
		if err != nil {
			c.closeConnection()
			return
		}
		if used == 0 {
			break
		}
		c.in = c.in[used:] // before handle, which may close the connection
		c.handleFrame(f)
	}
	if len(c.in) == 0 {
		c.in = nil
	}
}

// takeFiles removes and returns the first count file descriptors that arrived with messages. It
// returns an error if fewer have arrived.
func (c *conn) takeFiles(count int) ([]int, error) {
	if len(c.files) < count {
		return nil, failure("files are missing")
	}
	fds := c.files[:count:count]
	if c.files = c.files[count:]; len(c.files) == 0 {
		c.files = nil
	}
	return fds, nil
}

func (c *conn) sendMessage(kind wire.Kind, id uint32, message wire.Message) {
	if c.closed {
		return
	}
	c.out = wire.AppendFrame(c.out, wire.Frame{Kind: kind, ID: id, Body: wire.Marshal(c.version, message)})
	c.flushOutput()
}

func (c *conn) flushOutput() {
	for len(c.out) > 0 {
		n, err := syscall.Write(c.fd, c.out)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			c.loop.changeEvents(c.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
			return
		case err != nil:
			c.closeConnection()
			return
		default:
			c.out = c.out[n:]
		}
	}
	if c.out != nil {
		c.out = nil
		c.loop.changeEvents(c.fd, syscall.EPOLLIN)
	}
}

// closeConnection closes the connection. Commands of its exec requests are killed, because their
// result could not be delivered.
func (c *conn) closeConnection() {
	if c.closed {
		return
	}
	c.closed = true
	c.loop.closeDescriptor(&c.fd)
	for _, fd := range c.files {
		syscall.Close(fd)
	}
	c.files, c.in, c.out = nil, nil, nil
	for _, pid := range c.execs {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	for i, other := range c.loop.conns {
		if other == c {
			c.loop.conns = append(c.loop.conns[:i], c.loop.conns[i+1:]...)
			break
		}
	}
}

func (c *conn) sendDone(id uint32, err error) {
	d := wire.Done{Time: unixNano()}
	if err != nil {
		d.Error = err.Error()
	}
	c.sendMessage(wire.KindDone, id, &d)
}

func (c *conn) sendStarted(id uint32, pid int, result string, err error) {
	s := wire.Started{PID: int64(pid), Result: result}
	if err != nil {
		s.Error = err.Error()
	}
	c.sendMessage(wire.KindStarted, id, &s)
}

// handleHello sets the protocol version of the connection from a Hello frame, and responds. An
// agent from before protocol versions existed sends Hello with an empty body.
func (c *conn) handleHello(frame wire.Frame) error {
	if len(frame.Body) == 0 {
		c.greeted = true
		c.sendMessage(wire.KindSnapshot, frame.ID, c.loop.buildSnapshot())
		return nil
	}
	var m wire.Hello
	if err := wire.Unmarshal(1, frame.Body, &m); err != nil {
		return err
	}
	if m.Version < 1 {
		return wire.ErrMalformed
	}
	c.greeted, c.version = true, min(m.Version, wire.Version)
	c.sendMessage(wire.KindWelcome, frame.ID, &wire.Welcome{Version: c.version, Features: wire.Features,
		Snapshot: *c.loop.buildSnapshot()})
	return nil
}

// decodeBody decodes the body of a frame into message, which must be zero.
func (c *conn) decodeBody(frame wire.Frame, message wire.Message) error {
	return wire.Unmarshal(c.version, frame.Body, message)
}

// handleFrame performs the request of one frame. A malformed frame closes the connection, and so
// does a first frame that is not Hello.
func (c *conn) handleFrame(frame wire.Frame) {
	err := error(wire.ErrMalformed)
	if c.greeted || frame.Kind == wire.KindHello {
		err = c.serveRequest(frame)
	}
	if err != nil {
		c.closeConnection()
	}
}

func (c *conn) serveRequest(frame wire.Frame) error {
	l := c.loop
	var err error
	switch frame.Kind {
	case wire.KindHello:
		return c.handleHello(frame)
	case wire.KindPause:
		var m wire.Pause
		if err = c.decodeBody(frame, &m); err == nil {
			l.startPause(c, frame.ID, &m)
		}
	case wire.KindCreate:
		var m wire.Create
		if err = c.decodeBody(frame, &m); err == nil {
			l.createContainer(c, frame.ID, m)
		}
	case wire.KindStart:
		var m wire.Start
		if err = c.decodeBody(frame, &m); err == nil {
			l.startContainer(c, frame.ID, &m)
		}
	case wire.KindSignal:
		var m wire.Signal
		if err = c.decodeBody(frame, &m); err == nil {
			c.sendDone(frame.ID, l.sendSignal(c, &m))
		}
	case wire.KindExec:
		var m wire.Exec
		if err = c.decodeBody(frame, &m); err == nil {
			l.execCommand(c, frame.ID, &m)
		}
	case wire.KindAttach:
		var m wire.Attach
		if err = c.decodeBody(frame, &m); err == nil {
			c.sendDone(frame.ID, l.attachClient(c, &m))
		}
	case wire.KindResize:
		var m wire.Resize
		if err = c.decodeBody(frame, &m); err == nil {
			c.sendDone(frame.ID, l.resizeTerminal(&m))
		}
	case wire.KindReopen, wire.KindForget:
		var m wire.Target
		if err = c.decodeBody(frame, &m); err == nil {
			c.sendDone(frame.ID, l.reopenOrForget(frame.Kind, &m))
		}
	case wire.KindShutdown:
		l.requestShutdown()
		c.sendDone(frame.ID, nil)
	default: // from an agent of a later release, which must do without it
		c.sendDone(frame.ID, failure("this shim does not support requests of kind "+formatInt(int(frame.Kind))))
	}
	return err
}

// announceExit sends the exit of a process to every agent that has sent Hello.
func (l *loop) announceExit(exited *wire.Exited) {
	for _, c := range append([]*conn(nil), l.conns...) {
		if c.greeted {
			c.sendMessage(wire.KindExited, 0, exited)
		}
	}
}

// hasGreetedAgent reports whether an agent that has sent Hello is connected. Such an agent receives
// the exits of processes.
func (l *loop) hasGreetedAgent() bool {
	for _, c := range l.conns {
		if c.greeted {
			return true
		}
	}
	return false
}

// sendSignal sends a signal to the target process of the request. It returns nil if the process has
// exited.
func (l *loop) sendSignal(c *conn, request *wire.Signal) error {
	pid := 0
	switch {
	case request.Exec != 0:
		pid = c.execs[request.Exec]
	case request.Container == "":
		if !l.pause.ended {
			pid = l.pause.pid
		}
	default:
		if t := l.findContainer(request.Container); t != nil && t.state != wire.StateExited {
			pid = t.pid
		}
	}
	if pid <= 0 {
		return nil // the target has already ended
	}
	if err := syscall.Kill(pid, syscall.Signal(request.Signal)); err != nil && err != syscall.ESRCH {
		return failure(describeError("kill "+formatInt(pid), err))
	}
	return nil
}

func (l *loop) reopenOrForget(kind wire.Kind, request *wire.Target) error {
	t := l.findContainer(request.Container)
	if t == nil {
		return nil
	}
	if kind == wire.KindReopen {
		return t.log.reopenFile()
	}
	if t.state != wire.StateExited { // also while keelson-oci creates it
		return failure("container " + request.Container + " has not ended")
	}
	t.closeDescriptors()
	for i, other := range l.containers {
		if other == t {
			l.containers = append(l.containers[:i], l.containers[i+1:]...)
			break
		}
	}
	return nil
}

// requestShutdown kills pause and stops the loop after the current request and its response.
func (l *loop) requestShutdown() {
	if l.pause.pid > 0 && !l.pause.ended {
		_ = syscall.Kill(l.pause.pid, syscall.SIGKILL)
	}
	l.quit = true
}
