// Package shim is the parent process of one pod's processes. It holds their standard streams and
// terminals, writes their logs, reaps them and records how they ended. Agents connect to its socket
// and may be restarted.
//
// One thread runs an epoll loop; a second waits for children. Every pod of a node has a shim, so
// its memory use matters. Therefore the package does not import os, fmt or time, shares buffers,
// and buffers a stream only while a line is incomplete.
package shim

import (
	"strconv"
	"syscall"

	"keelson.dev/keelson/agent/oci/wire"
)

// ListenFD is the descriptor of the listening socket that the agent passes to its shim.
const ListenFD = 3

// failure is an error with the string as its text.
type failure string

func (f failure) Error() string { return string(f) }

// handler is called with the epoll events that have occurred on its descriptor.
type handler func(events uint32)

type loop struct {
	self     string // path of the shim's own binary, to start the pause helper
	epoll    int
	devNull  int
	handlers map[int]handler
	conns    []*conn
	scratch  []byte // shared read buffer
	program  program

	pause         pause
	containers    []*container
	children      map[int]*child
	earlyExits    map[int]earlyExit // exits of processes with a PID not yet reported by keelson-oci
	helpers       int               // running keelson-oci processes
	waitRequests  chan struct{}     // requests the waiting thread to wait for one child
	waitRequested bool              // the request was sent
	quit          bool
}

// pause is the pod's pause process; pid is 0 if it was never started.
type pause struct {
	pid   int
	ended bool
}

// child is a child process of the shim. The loop calls onExit with its exit code and the time when
// it has reaped the process.
type child struct {
	onExit func(code int, now int64)
}

type earlyExit struct {
	code int
	time int64
}

// Run serves connections on listenFD until an agent requests the shutdown. self is the path of the
// running binary.
func Run(listenFD int, self string) error {
	if err := setSubreaper(); err != nil {
		return err
	}
	ep, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	l := &loop{self: self, epoll: ep, devNull: null, handlers: map[int]handler{}, scratch: make([]byte, 32<<10),
		program:  ownProgram(),
		children: map[int]*child{}, earlyExits: map[int]earlyExit{}, waitRequests: make(chan struct{})}
	syscall.CloseOnExec(listenFD)
	if err := syscall.SetNonblock(listenFD, true); err != nil {
		return err
	}
	if err := l.watchDescriptor(listenFD, syscall.EPOLLIN, func(uint32) { l.acceptConnections(listenFD) }); err != nil {
		return err
	}
	if err := l.watchChildren(); err != nil {
		return err
	}
	return l.runLoop()
}

func (l *loop) runLoop() error {
	events := make([]syscall.EpollEvent, 16)
	for !l.quit {
		n, err := l.waitEvents(events)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range events[:n] {
			// An earlier handler of this round may have closed the descriptor.
			if h := l.handlers[int(e.Fd)]; h != nil {
				h(e.Events)
			}
		}
	}
	return nil
}

func (l *loop) watchDescriptor(fd int, events uint32, handle handler) error {
	if err := syscall.EpollCtl(l.epoll, syscall.EPOLL_CTL_ADD,
		fd, &syscall.EpollEvent{Events: events, Fd: int32(fd)}); err != nil {
		return err
	}
	l.handlers[fd] = handle
	return nil
}

// changeEvents changes the epoll events for which fd is watched; with 0, only hang-ups and errors
// are reported.
func (l *loop) changeEvents(fd int, events uint32) {
	_ = syscall.EpollCtl(l.epoll, syscall.EPOLL_CTL_MOD, fd, &syscall.EpollEvent{Events: events, Fd: int32(fd)})
}

// unwatchDescriptor stops watching fd without closing it.
func (l *loop) unwatchDescriptor(fd int) {
	if l.handlers[fd] != nil {
		delete(l.handlers, fd)
		_ = syscall.EpollCtl(l.epoll, syscall.EPOLL_CTL_DEL, fd, nil)
	}
}

// closeDescriptor stops watching *fd, closes it and sets it to -1.
func (l *loop) closeDescriptor(fd *int) {
	if *fd < 0 {
		return
	}
	l.unwatchDescriptor(*fd)
	syscall.Close(*fd)
	*fd = -1
}

func (l *loop) findContainer(id string) *container {
	for _, c := range l.containers {
		if c.request.Container == id {
			return c
		}
	}
	return nil
}

// buildSnapshot returns the state of pause and all containers, for an agent that has just
// connected.
func (l *loop) buildSnapshot() *wire.Snapshot {
	s := &wire.Snapshot{PausePID: int64(l.pause.pid), PauseEnded: l.pause.ended}
	for _, c := range l.containers {
		if c.state != 0 {
			s.Containers = append(s.Containers, wire.Status{Container: c.request.Container, State: c.state,
				PID: int64(c.pid), Started: c.started, Exit: c.exit})
		}
	}
	return s
}

// watchChildren starts the thread that waits for children. The thread waits with WNOWAIT, and only
// the loop reaps. A signal that the loop sends therefore never reaches a reused PID.
func (l *loop) watchChildren() error {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return err
	}
	go func() {
		one := []byte{1}
		for range l.waitRequests {
			for waitAny() == syscall.EINTR {
			}
			if _, err := syscall.Write(p[1], one); err != nil {
				return
			}
		}
	}()
	return l.watchDescriptor(p[0], syscall.EPOLLIN, func(uint32) {
		_, _ = syscall.Read(p[0], l.scratch[:16])
		l.waitRequested = false
		l.reapChildren()
	})
}

// expectChild makes the waiting thread wait for the exit of the next child, unless it already
// waits.
func (l *loop) expectChild() {
	if !l.waitRequested {
		l.waitRequested = true
		l.waitRequests <- struct{}{}
	}
}

func (l *loop) reapChildren() {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err == syscall.ECHILD {
			return // no children: the next spawn waits again
		}
		if err != nil || pid <= 0 {
			l.expectChild()
			return
		}
		code := ws.ExitStatus()
		if ws.Signaled() {
			code = 128 + int(ws.Signal())
		}
		if c := l.children[pid]; c != nil {
			delete(l.children, pid)
			c.onExit(code, unixNano())
		} else if l.helpers > 0 {
			l.earlyExits[pid] = earlyExit{code, unixNano()}
		}
	}
}

// registerChild registers ended as the handler of the exit of a child process. If the process has
// already exited, it calls ended immediately.
func (l *loop) registerChild(pid int, ended func(code int, now int64)) {
	l.children[pid] = &child{ended}
	if e, ok := l.earlyExits[pid]; ok {
		delete(l.earlyExits, pid)
		delete(l.children, pid)
		ended(e.code, e.time)
	}
}

// finishHelper handles the end of a keelson-oci process (a helper), after its response was handled.
// When no other helper runs, it forgets the exits of unknown processes. It makes the waiting thread
// wait for the container process that the helper may have left as a child of the shim.
func (l *loop) finishHelper() {
	if l.helpers--; l.helpers == 0 {
		clear(l.earlyExits)
	}
	l.expectChild() // keelson-oci has left a child, perhaps the first one
}

func describeError(prefix string, err error) string { return prefix + ": " + err.Error() }

func formatInt(count int) string { return strconv.Itoa(count) }
