package storeproc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest/remote"
)

// Member is one replica of a group: its processes, one after the other, and its persistent state.
// Its methods are safe for concurrent use.
type Member struct {
	Name    string
	Address string // of the peer port
	DataDir string
	LogFile string // stdout and stderr of its processes, appended

	group *Group
	hold  *os.File       // the socket that keeps the port reserved
	store *remote.Client // the same for all its processes

	changing sync.Mutex // serializes changes of the process

	mu     sync.Mutex
	setup  setup
	proc   *process // the last process, which may have exited
	lives  int      // processes started
	paused bool
	died   error // unexpected exits
	gone   bool  // removed: it cannot be started again
}

// process is one process of a member.
type process struct {
	cmd      *exec.Cmd
	ended    chan struct{} // closed when Wait has returned
	err      error         // of Wait; valid after ended is closed
	expected bool          // its exit was requested; guarded by Member.mu
}

func (p *process) isRunning() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Store returns the store as seen through this replica. The client stays the same when the process
// is restarted; its calls block while the process is down.
func (m *Member) Store() raftstore.Store { return m.store }

// PID returns the process ID, or 0 if the replica is down.
func (m *Member) PID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.proc.isRunning() {
		return 0
	}
	return m.proc.cmd.Process.Pid
}

// ProcessCount returns the number of processes that this replica has had.
func (m *Member) ProcessCount() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lives
}

// Running reports whether the process is running or paused.
func (m *Member) Running() bool { return m.PID() != 0 }

// Up reports whether the process is running, and is neither paused nor being stopped.
func (m *Member) Up() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.proc.isRunning() && !m.proc.expected && !m.paused
}

// Start starts the replica's process and returns when it responds, which may be before it has
// caught up. It does nothing if the process is running.
func (m *Member) Start(ctx context.Context) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.PID() != 0 {
		return nil
	}
	p, err := m.launchProcess()
	if err == nil {
		err = m.awaitResponse(ctx, p)
	}
	if err == nil {
		// A link may have changed since the process was launched.
		err = m.setLinks(ctx, m.group.linksOf(m.Name))
	}
	if err != nil {
		return fmt.Errorf("starting replica %s: %w%s", m.Name, err, m.lastLogLines())
	}
	return nil
}

func (m *Member) launchProcess() (*process, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone {
		return nil, errors.New("the replica was removed from the group permanently")
	}
	m.setup.Links = m.group.linksOf(m.Name)
	path := m.LogFile + ".setup"
	if err := m.setup.writeFile(path); err != nil {
		return nil, err
	}
	// The socket left by a killed process would make the next process fail to listen.
	if err := os.Remove(m.setup.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	log, err := os.OpenFile(m.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(self), ended: make(chan struct{})}
	p.cmd.Env = append(append(os.Environ(), m.group.options.Env...), environment+"="+path)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	// The child is killed when this process dies, even if the child is paused.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	m.proc, m.paused = p, false
	m.lives++
	go m.awaitExit(p)
	return p, nil
}

// awaitExit waits for a process and records its exit if it was unexpected.
func (m *Member) awaitExit(p *process) {
	p.err = p.cmd.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !p.expected {
		m.died = errors.Join(m.died, fmt.Errorf("replica %s exited unexpectedly: %v%s", m.Name, p.err,
			m.lastLogLines()))
	}
	close(p.ended)
}

// awaitResponse waits until the new process responds.
func (m *Member) awaitResponse(ctx context.Context, p *process) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watched := make(chan struct{})
	defer close(watched)
	go func() {
		select {
		case <-p.ended:
			cancel(fmt.Errorf("its process exited: %v", p.err))
		case <-watched:
		}
	}()
	m.store.Reconnect()
	for {
		_, err := m.store.Admin().Status(ctx, new(storev1.AdminStatusRequest))
		if err == nil {
			return nil
		}
		// The closed connection to the previous process may be detected only now.
		if err = remote.Err(err); ctx.Err() != nil || !errors.Is(err, raftstore.ErrUnavailable) {
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// Kill kills the process with SIGKILL, like a crash, and waits until it has exited.
func (m *Member) Kill() error { return m.stopProcess(syscall.SIGKILL) }

// Stop stops the process with SIGTERM and waits until it has exited. It returns an error if the
// exit is not clean.
func (m *Member) Stop() error { return m.stopProcess(syscall.SIGTERM) }

// exitTimeout is the time limit for a replica to exit. It is far longer than a replica needs on a
// busy machine.
const exitTimeout = 30 * time.Second

func (m *Member) stopProcess(with syscall.Signal) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	p, paused := m.proc, m.paused
	if !p.isRunning() {
		m.mu.Unlock()
		return nil
	}
	p.expected, m.paused = true, false
	m.mu.Unlock()
	err := m.sendSignal(p, with)
	if paused && with != syscall.SIGKILL {
		err = errors.Join(err, m.sendSignal(p, syscall.SIGCONT))
	}
	late := time.NewTimer(exitTimeout)
	defer late.Stop()
	select {
	case <-p.ended:
		if with == syscall.SIGTERM && p.err != nil {
			err = fmt.Errorf("stopping replica %s: %w%s", m.Name, p.err, m.lastLogLines())
		}
	case <-late.C:
		err = fmt.Errorf("replica %s does not stop within %s%s", m.Name, exitTimeout, m.lastLogLines())
		p.cmd.Process.Kill()
		<-p.ended
	}
	return err
}

func (m *Member) sendSignal(p *process, s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %s to replica %s: %w", s, m.Name, err)
	}
	return nil
}

// Pause stops the process with SIGSTOP: it does not respond, and its connections stay open. Resume
// continues it.
func (m *Member) Pause() error { return m.setPaused(syscall.SIGSTOP, true) }

// Resume continues a paused process.
func (m *Member) Resume(ctx context.Context) error {
	if err := m.setPaused(syscall.SIGCONT, false); err != nil || !m.Up() {
		return err
	}
	return m.setLinks(ctx, m.group.linksOf(m.Name))
}

func (m *Member) setPaused(s syscall.Signal, paused bool) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.proc.isRunning() {
		return nil
	}
	m.paused = paused
	return m.sendSignal(m.proc, s)
}

// Wipe deletes the data of a replica that is down. The replica must be removed from the cluster
// before it is started again, because it is then a new replica with an old name.
func (m *Member) Wipe() error {
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.Running() {
		return fmt.Errorf("wipe replica %s: it is running", m.Name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.setup.Bootstrap = false
	return os.RemoveAll(m.DataDir)
}

// Exited returns a channel that is closed when the last process has exited, or nil if no process
// was started.
func (m *Member) Exited() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.proc == nil {
		return nil
	}
	return m.proc.ended
}

// Err returns the unexpected exits of this member's processes, with the last lines of its log. A
// test that expects them can call ClearErr.
func (m *Member) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.died
}

// ClearErr returns the errors of Err and resets them.
func (m *Member) ClearErr() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.died
	m.died = nil
	return err
}

// lastLogLines returns the last lines of the log file.
func (m *Member) lastLogLines() string {
	const lines = 12
	b, err := os.ReadFile(m.LogFile)
	if err != nil {
		return ""
	}
	all := strings.Split(strings.TrimSpace(string(b)), "\n")
	return "\n\t" + strings.Join(all[max(0, len(all)-lines):], "\n\t")
}

// Status returns the replica's view of the cluster. ready is true if the replica has caught up.
func (m *Member) Status(ctx context.Context) (s raftstore.Status, ready bool, err error) {
	resp, err := m.store.Admin().Status(ctx, new(storev1.AdminStatusRequest))
	if err != nil {
		return s, false, fmt.Errorf("status of %s: %w", m.Name, remote.Err(err))
	}
	if err := json.Unmarshal(resp.GetStatus(), &s); err != nil {
		return s, false, fmt.Errorf("status of %s: %w", m.Name, err)
	}
	return s, resp.GetReady(), nil
}

// Hash returns the revision of the replica's state and the hex digest of the state.
func (m *Member) Hash(ctx context.Context) (raftstore.Revision, string, error) {
	resp, err := m.store.Admin().Hash(ctx, new(storev1.AdminHashRequest))
	if err != nil {
		return 0, "", fmt.Errorf("hash of %s: %w", m.Name, remote.Err(err))
	}
	return raftstore.Revision(resp.GetRevision()), fmt.Sprintf("%x", resp.GetHash()), nil
}

// Snapshot makes the replica write a snapshot and truncate its log.
func (m *Member) Snapshot(ctx context.Context) error {
	_, err := m.store.Admin().Snapshot(ctx, new(storev1.AdminSnapshotRequest))
	return m.wrapError("snapshot on", err)
}

// Compact compacts the history up to and including a revision. This replica must be the leader.
func (m *Member) Compact(ctx context.Context, upTo raftstore.Revision) error {
	_, err := m.store.Admin().Compact(ctx, &storev1.AdminCompactRequest{Revision: uint64(upTo)})
	return m.wrapError("compaction on", err)
}

// Transfer starts a leadership transfer. This replica must be the leader.
func (m *Member) Transfer(ctx context.Context) error {
	_, err := m.store.Admin().Transfer(ctx, new(storev1.AdminTransferRequest))
	return m.wrapError("transfer from", err)
}

// AddMember adds other to the cluster's members, through this replica.
func (m *Member) AddMember(ctx context.Context, other *Member) error {
	_, err := m.store.Admin().AddMember(ctx, &storev1.AddMemberRequest{Id: other.Name, Address: other.Address})
	return m.wrapError("adding "+other.Name+" through", err)
}

// RemoveMember removes other from the cluster's members, through this replica. The process of other
// keeps running.
func (m *Member) RemoveMember(ctx context.Context, other *Member) error {
	_, err := m.store.Admin().RemoveMember(ctx, &storev1.RemoveMemberRequest{Id: other.Name})
	return m.wrapError("removing "+other.Name+" through", err)
}

// ClockOffset sets the difference between the replica's clock and the machine's clock, now and
// after each restart. Negative is behind.
func (m *Member) ClockOffset(ctx context.Context, offset time.Duration) error {
	m.mu.Lock()
	m.setup.Clock = offset
	m.mu.Unlock()
	if !m.Up() {
		return nil
	}
	_, err := m.store.Admin().SetClock(ctx, &storev1.AdminClock{OffsetMs: offset.Milliseconds()})
	return m.wrapError("clock of", err)
}

func (m *Member) wrapError(what string, err error) error {
	if err != nil {
		return fmt.Errorf("%s %s: %w", what, m.Name, remote.Err(err))
	}
	return nil
}

func (m *Member) setLinks(ctx context.Context, links map[string]Link) error {
	req := new(storev1.AdminLinks)
	for peer, l := range links {
		req.Links = append(req.Links, &storev1.AdminLink{
			Peer: peer, HoldSent: l.HoldSent, HoldReceived: l.HoldReceived,
			DelayUs: l.Delay.Microseconds(), JitterUs: l.Jitter.Microseconds(),
		})
	}
	_, err := m.store.Admin().SetLinks(ctx, req)
	return m.wrapError("links of", err)
}
