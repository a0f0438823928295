package shim

import (
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// attachment connects one client to a container's streams. Its pipes belong to an agent. When the
// agent dies, the pipes break and the attachment is removed.
type attachment struct {
	t       *container
	in      int       // the client's input; -1 if closed
	out     [2]int    // the client's stdout and stderr; -1 if closed
	waiting [2][]byte // output that did not fit into out
	typed   []byte    // input that did not fit into the container's stdin
}

func (l *loop) attach(c *conn, m *wire.Attach) error {
	fds, err := c.take(m.Files())
	if err != nil {
		return err
	}
	t := l.find(m.Container)
	if t == nil || t.state == 0 || t.state == wire.StateExited {
		closeAll(fds)
		return failure("container " + m.Container + " is not running")
	}
	a := &attachment{t: t, in: -1, out: [2]int{-1, -1}}
	ends := []*int{}
	for _, want := range []struct {
		is bool
		fd *int
	}{{m.Stdin, &a.in}, {m.Stdout, &a.out[0]}, {m.Stderr, &a.out[1]}} {
		if want.is {
			ends = append(ends, want.fd)
		}
	}
	for i, fd := range fds {
		*ends[i] = fd
		_ = syscall.SetNonblock(fd, true)
	}
	t.attached = append(t.attached, a)
	if a.in >= 0 {
		if t.stdin < 0 {
			l.drop(&a.in)
		} else if err := l.add(a.in, syscall.EPOLLIN, func(uint32) { a.typing() }); err != nil {
			a.close()
			return err
		}
	}
	return nil
}

// spread writes output of stream i to all attachments. An attachment that does not keep up blocks
// the container, as a terminal would. No output is lost and no buffer grows.
func (t *container) spread(i int, b []byte) {
	for _, a := range append([]*attachment(nil), t.attached...) {
		if a.out[i] < 0 {
			continue
		}
		if rest := a.push(i, b); len(rest) > 0 {
			a.waiting[i] = append(a.waiting[i], rest...)
			if err := t.l.add(a.out[i], syscall.EPOLLOUT, func(uint32) { a.drain(i) }); err != nil {
				a.close()
				continue
			}
			t.pauseOutput(true)
		}
	}
}

// push writes as much of b as fits and returns the rest.
func (a *attachment) push(i int, b []byte) []byte {
	for len(b) > 0 {
		n, err := syscall.Write(a.out[i], b)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return b
		case err != nil:
			a.waiting[i] = nil
			a.t.l.drop(&a.out[i])
			a.closeIfIdle()
			return nil
		default:
			b = b[n:]
		}
	}
	return nil
}

func (a *attachment) drain(i int) {
	a.waiting[i] = a.push(i, a.waiting[i])
	if len(a.waiting[i]) > 0 {
		return
	}
	a.waiting[i] = nil
	if a.out[i] >= 0 {
		a.t.l.forget(a.out[i])
	}
	a.t.pauseOutput(false)
}

// pauseOutput stops or resumes reading the container's output. It resumes only when no attachment
// has pending output.
func (t *container) pauseOutput(stop bool) {
	if !stop {
		for _, a := range t.attached {
			if len(a.waiting[0])+len(a.waiting[1]) > 0 {
				return
			}
		}
	}
	for i, fd := range t.out {
		switch {
		case fd < 0:
		case stop:
			t.l.forget(fd)
		case t.l.handlers[fd] == nil:
			_ = t.l.add(fd, syscall.EPOLLIN, func(uint32) { t.readable(i) })
		}
	}
	// The container may have ended while its output was blocked.
	if !stop && t.state == wire.StateExited {
		for i := range t.out {
			for t.out[i] >= 0 && t.l.handlers[t.out[i]] != nil && t.readable(i) {
			}
		}
		if t.out[0] < 0 && t.out[1] < 0 {
			t.detachAll()
		}
	}
}

// typing reads the client's input for the container. At its end it closes stdin if StdinOnce is
// set.
func (a *attachment) typing() {
	t := a.t
	n, err := syscall.Read(a.in, t.l.scratch)
	switch {
	case err == syscall.EINTR || err == syscall.EAGAIN:
		return
	case err != nil || n <= 0:
		t.l.drop(&a.in)
		if t.req.StdinOnce && !t.req.TTY {
			t.l.drop(&t.stdin)
		}
		a.closeIfIdle()
		return
	}
	a.typed = append(a.typed, t.l.scratch[:n]...)
	a.feed()
}

// feed writes pending input to the container's stdin. While stdin is full, no more input is read
// from the client.
func (a *attachment) feed() {
	t := a.t
	for len(a.typed) > 0 && t.stdin >= 0 {
		n, err := syscall.Write(t.stdin, a.typed)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			a.t.l.forget(a.in)
			a.whenWritable(a.feed)
			return
		case err != nil:
			a.typed = nil
		default:
			a.typed = a.typed[n:]
		}
	}
	a.typed = nil
	if a.in >= 0 && t.l.handlers[a.in] == nil {
		_ = t.l.add(a.in, syscall.EPOLLIN, func(uint32) { a.typing() })
	}
}

// whenWritable calls f when the container's stdin accepts more input. It watches a duplicate of the
// descriptor, because a terminal's master is already watched for output.
func (a *attachment) whenWritable(f func()) {
	fd, err := syscall.Dup(a.t.stdin)
	if err != nil {
		a.close()
		return
	}
	syscall.CloseOnExec(fd)
	err = a.t.l.add(fd, syscall.EPOLLOUT, func(uint32) {
		a.t.l.drop(&fd)
		f()
	})
	if err != nil {
		a.t.l.drop(&fd)
		a.close()
	}
}

// closeIfIdle removes an attachment if all its streams are closed.
func (a *attachment) closeIfIdle() {
	if a.in < 0 && a.out[0] < 0 && a.out[1] < 0 {
		a.close()
	}
}

func (a *attachment) close() {
	l := a.t.l
	l.drop(&a.in)
	l.drop(&a.out[0])
	l.drop(&a.out[1])
	a.waiting, a.typed = [2][]byte{}, nil
	for i, other := range a.t.attached {
		if other == a {
			a.t.attached = append(a.t.attached[:i], a.t.attached[i+1:]...)
			break
		}
	}
	a.t.pauseOutput(false)
}

// detachAll closes the attachments without pending output, so that clients see the end of the
// output.
func (t *container) detachAll() {
	for _, a := range append([]*attachment(nil), t.attached...) {
		if len(a.waiting[0])+len(a.waiting[1]) == 0 {
			a.close()
		}
	}
}
