package shim

import (
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// conn is the connection of one agent.
type conn struct {
	l      *loop
	fd     int
	in     []byte
	out    []byte
	files  []int // received descriptors that no message has used yet
	closed bool

	hello   bool           // Hello was received: send it the ends of processes
	version int64          // protocol version of this connection
	execs   map[uint32]int // request ID → PID of its command
}

func (l *loop) accept(listen int) {
	for {
		fd, _, err := syscall.Accept4(listen, syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK)
		if err != nil {
			return
		}
		c := &conn{l: l, fd: fd}
		if err := l.add(fd, syscall.EPOLLIN, c.ready); err != nil {
			syscall.Close(fd)
			return
		}
		l.conns = append(l.conns, c)
	}
}

func (c *conn) ready(events uint32) {
	if events&syscall.EPOLLOUT != 0 {
		c.flush()
	}
	if events&(syscall.EPOLLIN|syscall.EPOLLHUP|syscall.EPOLLERR) != 0 && !c.closed {
		c.receive()
	}
}

func (c *conn) receive() {
	oob := make([]byte, syscall.CmsgSpace(4*4))
	n, oobn, _, _, err := syscall.Recvmsg(c.fd, c.l.scratch, oob, syscall.MSG_CMSG_CLOEXEC)
	if err == syscall.EAGAIN || err == syscall.EINTR {
		return
	}
	if err != nil || n == 0 {
		c.close()
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
	c.in = append(c.in, c.l.scratch[:n]...)
	for !c.closed {
		f, used, err := wire.NextFrame(c.in)
		if err != nil {
			c.close()
			return
		}
		if used == 0 {
			break
		}
		c.in = c.in[used:] // before handle, which may close the connection
		c.handle(f)
	}
	if len(c.in) == 0 {
		c.in = nil
	}
}

// take removes and returns the n descriptors of a message.
func (c *conn) take(n int) ([]int, error) {
	if len(c.files) < n {
		return nil, failure("files are missing")
	}
	fds := c.files[:n:n]
	if c.files = c.files[n:]; len(c.files) == 0 {
		c.files = nil
	}
	return fds, nil
}

func (c *conn) send(kind wire.Kind, id uint32, m wire.Message) {
	if c.closed {
		return
	}
	c.out = wire.AppendFrame(c.out, wire.Frame{Kind: kind, ID: id, Body: wire.Marshal(c.version, m)})
	c.flush()
}

func (c *conn) flush() {
	for len(c.out) > 0 {
		n, err := syscall.Write(c.fd, c.out)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			c.l.mod(c.fd, syscall.EPOLLIN|syscall.EPOLLOUT)
			return
		case err != nil:
			c.close()
			return
		default:
			c.out = c.out[n:]
		}
	}
	if c.out != nil {
		c.out = nil
		c.l.mod(c.fd, syscall.EPOLLIN)
	}
}

// close closes the connection. Commands of its exec requests are killed, because their result could
// not be delivered.
func (c *conn) close() {
	if c.closed {
		return
	}
	c.closed = true
	c.l.drop(&c.fd)
	for _, fd := range c.files {
		syscall.Close(fd)
	}
	c.files, c.in, c.out = nil, nil, nil
	for _, pid := range c.execs {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	for i, other := range c.l.conns {
		if other == c {
			c.l.conns = append(c.l.conns[:i], c.l.conns[i+1:]...)
			break
		}
	}
}

func (c *conn) done(id uint32, err error) {
	d := wire.Done{Time: now()}
	if err != nil {
		d.Error = err.Error()
	}
	c.send(wire.KindDone, id, &d)
}

func (c *conn) started(id uint32, pid int, result string, err error) {
	s := wire.Started{PID: int64(pid), Result: result}
	if err != nil {
		s.Error = err.Error()
	}
	c.send(wire.KindStarted, id, &s)
}

// greet handles Hello and sets the protocol version. An agent older than protocol versions sends
// Hello with an empty body.
func (c *conn) greet(f wire.Frame) error {
	if len(f.Body) == 0 {
		c.hello = true
		c.send(wire.KindSnapshot, f.ID, c.l.snapshot())
		return nil
	}
	var m wire.Hello
	if err := wire.Unmarshal(1, f.Body, &m); err != nil {
		return err
	}
	if m.Version < 1 {
		return wire.ErrMalformed
	}
	c.hello, c.version = true, min(m.Version, wire.Version)
	c.send(wire.KindWelcome, f.ID, &wire.Welcome{Version: c.version, Features: wire.Features, Snapshot: *c.l.snapshot()})
	return nil
}

// read decodes the body of a frame into m, which must be zero.
func (c *conn) read(f wire.Frame, m wire.Message) error { return wire.Unmarshal(c.version, f.Body, m) }

// handle performs the request of one frame. A malformed frame closes the connection, and so does a
// first frame that is not Hello.
func (c *conn) handle(f wire.Frame) {
	err := error(wire.ErrMalformed)
	if c.hello || f.Kind == wire.KindHello {
		err = c.serve(f)
	}
	if err != nil {
		c.close()
	}
}

func (c *conn) serve(f wire.Frame) error {
	l := c.l
	var err error
	switch f.Kind {
	case wire.KindHello:
		return c.greet(f)
	case wire.KindPause:
		var m wire.Pause
		if err = c.read(f, &m); err == nil {
			l.startPause(c, f.ID, &m)
		}
	case wire.KindCreate:
		var m wire.Create
		if err = c.read(f, &m); err == nil {
			l.create(c, f.ID, m)
		}
	case wire.KindStart:
		var m wire.Start
		if err = c.read(f, &m); err == nil {
			l.start(c, f.ID, &m)
		}
	case wire.KindSignal:
		var m wire.Signal
		if err = c.read(f, &m); err == nil {
			c.done(f.ID, l.signal(c, &m))
		}
	case wire.KindExec:
		var m wire.Exec
		if err = c.read(f, &m); err == nil {
			l.exec(c, f.ID, &m)
		}
	case wire.KindAttach:
		var m wire.Attach
		if err = c.read(f, &m); err == nil {
			c.done(f.ID, l.attach(c, &m))
		}
	case wire.KindResize:
		var m wire.Resize
		if err = c.read(f, &m); err == nil {
			c.done(f.ID, l.resize(&m))
		}
	case wire.KindReopen, wire.KindForget:
		var m wire.Target
		if err = c.read(f, &m); err == nil {
			c.done(f.ID, l.target(f.Kind, &m))
		}
	case wire.KindShutdown:
		l.shutdown()
		c.done(f.ID, nil)
	default: // from an agent of a later release, which must do without it
		c.done(f.ID, failure("this shim knows no request of kind "+itoa(int(f.Kind))))
	}
	return err
}

// announce sends the end of a process to every agent that has sent Hello.
func (l *loop) announce(e *wire.Exited) {
	for _, c := range append([]*conn(nil), l.conns...) {
		if c.hello {
			c.send(wire.KindExited, 0, e)
		}
	}
}

// heard reports whether a connected agent receives the ends of processes.
func (l *loop) heard() bool {
	for _, c := range l.conns {
		if c.hello {
			return true
		}
	}
	return false
}

// signal sends a signal to the target process of m. A process that has ended is not an error.
func (l *loop) signal(c *conn, m *wire.Signal) error {
	pid := 0
	switch {
	case m.Exec != 0:
		pid = c.execs[m.Exec]
	case m.Container == "":
		if !l.pauseEnded {
			pid = l.pausePID
		}
	default:
		if t := l.find(m.Container); t != nil && t.state != wire.StateExited {
			pid = t.pid
		}
	}
	if pid <= 0 {
		return nil // the target has already ended
	}
	if err := syscall.Kill(pid, syscall.Signal(m.Signal)); err != nil && err != syscall.ESRCH {
		return failure(describe("kill "+itoa(pid), err))
	}
	return nil
}

func (l *loop) target(kind wire.Kind, m *wire.Target) error {
	t := l.find(m.Container)
	if t == nil {
		return nil
	}
	if kind == wire.KindReopen {
		return t.log.reopen()
	}
	if t.state != wire.StateExited { // also while keelson-oci creates it
		return failure("container " + m.Container + " has not ended")
	}
	t.release()
	for i, other := range l.containers {
		if other == t {
			l.containers = append(l.containers[:i], l.containers[i+1:]...)
			break
		}
	}
	return nil
}

// shutdown kills pause and stops the loop after the current request and its response.
func (l *loop) shutdown() {
	if l.pausePID > 0 && !l.pauseEnded {
		_ = syscall.Kill(l.pausePID, syscall.SIGKILL)
	}
	l.quit = true
}
