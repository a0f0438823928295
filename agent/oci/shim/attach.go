package shim

import (
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// attachment connects one client to a container's streams. Its pipes belong to an agent process.
// When the agent exits, the pipes break and the attachment is removed.
type attachment struct {
	container     *container
	in            int       // the client's input; -1 if closed
	out           [2]int    // the client's stdout and stderr; -1 if closed
	pendingOutput [2][]byte // output that did not fit into out
	pendingInput  []byte    // input that did not fit into the container's stdin
}

func (l *loop) attachClient(c *conn, request *wire.Attach) error {
	fds, err := c.takeFiles(request.Files())
	if err != nil {
		return err
	}
	t := l.findContainer(request.Container)
	if t == nil || t.state == 0 || t.state == wire.StateExited {
		closeAll(fds)
		return failure("container " + request.Container + " is not running")
	}
	a := &attachment{container: t, in: -1, out: [2]int{-1, -1}}
	ends := []*int{}
	for _, stream := range []struct {
		is bool
		fd *int
	}{{request.Stdin, &a.in}, {request.Stdout, &a.out[0]}, {request.Stderr, &a.out[1]}} {
		if stream.is {
			ends = append(ends, stream.fd)
		}
	}
	for i, fd := range fds {
		*ends[i] = fd
		_ = syscall.SetNonblock(fd, true)
	}
	t.attached = append(t.attached, a)
	if a.in >= 0 {
		if t.stdin < 0 {
			l.closeDescriptor(&a.in)
		} else if err := l.watchDescriptor(a.in, syscall.EPOLLIN, func(uint32) { a.readInput() }); err != nil {
			a.closeAttachment()
			return err
		}
	}
	return nil
}

// writeToClients writes output of stream i (0 is stdout, 1 is stderr) to all attachments. A slow
// attachment blocks the container's output, as a terminal would. No output is lost, and no buffer
// grows without bound.
func (t *container) writeToClients(i int, data []byte) {
	for _, a := range append([]*attachment(nil), t.attached...) {
		if a.out[i] < 0 {
			continue
		}
		if rest := a.writeOutput(i, data); len(rest) > 0 {
			a.pendingOutput[i] = append(a.pendingOutput[i], rest...)
			if err := t.loop.watchDescriptor(a.out[i], syscall.EPOLLOUT, func(uint32) {
				a.writePending(i)
			}); err != nil {
				a.closeAttachment()
				continue
			}
			t.pauseOutput(true)
		}
	}
}

// writeOutput writes as much of data as the client's pipe of stream i accepts, and returns the
// rest. After a write error it closes that pipe and returns nil.
func (a *attachment) writeOutput(i int, data []byte) []byte {
	for len(data) > 0 {
		n, err := syscall.Write(a.out[i], data)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return data
		case err != nil:
			a.pendingOutput[i] = nil
			a.container.loop.closeDescriptor(&a.out[i])
			a.closeIfIdle()
			return nil
		default:
			data = data[n:]
		}
	}
	return nil
}

func (a *attachment) writePending(i int) {
	a.pendingOutput[i] = a.writeOutput(i, a.pendingOutput[i])
	if len(a.pendingOutput[i]) > 0 {
		return
	}
	a.pendingOutput[i] = nil
	if a.out[i] >= 0 {
		a.container.loop.unwatchDescriptor(a.out[i])
	}
	a.container.pauseOutput(false)
}

// pauseOutput stops reading the container's output if stop is true, and otherwise resumes reading.
// It resumes only when no attachment has pending output.
func (t *container) pauseOutput(stop bool) {
	if !stop {
		for _, a := range t.attached {
			if len(a.pendingOutput[0])+len(a.pendingOutput[1]) > 0 {
				return
			}
		}
	}
	for i, fd := range t.out {
		switch {
		case fd < 0:
		case stop:
			t.loop.unwatchDescriptor(fd)
		case t.loop.handlers[fd] == nil:
			_ = t.loop.watchDescriptor(fd, syscall.EPOLLIN, func(uint32) { t.readOutput(i) })
		}
	}
	// The container may have ended while its output was blocked.
	if !stop && t.state == wire.StateExited {
		for i := range t.out {
			for t.out[i] >= 0 && t.loop.handlers[t.out[i]] != nil && t.readOutput(i) {
			}
		}
		if t.out[0] < 0 && t.out[1] < 0 {
			t.detachAll()
		}
	}
}

// readInput reads the client's input once and writes it to the container's stdin. At the end of the
// input, it closes the container's stdin if StdinOnce is set.
func (a *attachment) readInput() {
	t := a.container
	n, err := syscall.Read(a.in, t.loop.scratch)
	switch {
	case err == syscall.EINTR || err == syscall.EAGAIN:
		return
	case err != nil || n <= 0:
		t.loop.closeDescriptor(&a.in)
		if t.request.StdinOnce && !t.request.TTY {
			t.loop.closeDescriptor(&t.stdin)
		}
		a.closeIfIdle()
		return
	}
	a.pendingInput = append(a.pendingInput, t.loop.scratch[:n]...)
	a.writeInput()
}

// writeInput writes pending input to the container's stdin. While stdin is full, no more input is
// read from the client.
func (a *attachment) writeInput() {
	t := a.container
	for len(a.pendingInput) > 0 && t.stdin >= 0 {
		n, err := syscall.Write(t.stdin, a.pendingInput)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			a.container.loop.unwatchDescriptor(a.in)
			a.whenWritable(a.writeInput)
			return
		case err != nil:
			a.pendingInput = nil
		default:
			a.pendingInput = a.pendingInput[n:]
		}
	}
	a.pendingInput = nil
	if a.in >= 0 && t.loop.handlers[a.in] == nil {
		_ = t.loop.watchDescriptor(a.in, syscall.EPOLLIN, func(uint32) { a.readInput() })
	}
}

// whenWritable calls resume when the container's stdin accepts more input. It watches a duplicate
// of the descriptor, because a terminal's master is already watched for output under its own
// number.
func (a *attachment) whenWritable(resume func()) {
	fd, err := syscall.Dup(a.container.stdin)
	if err != nil {
		a.closeAttachment()
		return
	}
	syscall.CloseOnExec(fd)
	err = a.container.loop.watchDescriptor(fd, syscall.EPOLLOUT, func(uint32) {
		a.container.loop.closeDescriptor(&fd)
		resume()
	})
	if err != nil {
		a.container.loop.closeDescriptor(&fd)
		a.closeAttachment()
	}
}

// closeIfIdle removes an attachment if all its streams are closed.
func (a *attachment) closeIfIdle() {
	if a.in < 0 && a.out[0] < 0 && a.out[1] < 0 {
		a.closeAttachment()
	}
}

func (a *attachment) closeAttachment() {
	l := a.container.loop
	l.closeDescriptor(&a.in)
	l.closeDescriptor(&a.out[0])
	l.closeDescriptor(&a.out[1])
	a.pendingOutput, a.pendingInput = [2][]byte{}, nil
	for i, other := range a.container.attached {
		if other == a {
			a.container.attached = append(a.container.attached[:i], a.container.attached[i+1:]...)
			break
		}
	}
	a.container.pauseOutput(false)
}

// detachAll closes the attachments without pending output, so that clients see the end of the
// output.
func (t *container) detachAll() {
	for _, a := range append([]*attachment(nil), t.attached...) {
		if len(a.pendingOutput[0])+len(a.pendingOutput[1]) == 0 {
			a.closeAttachment()
		}
	}
}
