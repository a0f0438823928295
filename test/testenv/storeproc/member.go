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

// Member is one replica of a group: a process that comes and goes, and what
// outlasts it. Methods may be called from any goroutine.
type Member struct {
	Name    string
	Address string // of its peer port
	DataDir string
	LogFile string // what its processes wrote to stderr, one after the other

	group *Group
	hold  *os.File       // keeps the port reserved while no process has it
	store *remote.Client // the same through all its processes

	changing sync.Mutex // one change of the process at a time

	mu     sync.Mutex
	setup  setup
	proc   *process // the last one, which may have ended
	lives  int      // processes started
	paused bool
	died   error // ends that nobody asked for
	gone   bool  // removed: no process again
}

// process is one life of a member.
type process struct {
	cmd      *exec.Cmd
	ended    chan struct{} // closed when it has been waited for
	err      error         // of Wait; after ended
	expected bool          // it was asked to end; under Member.mu
}

func (p *process) running() bool {
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

// Store is the store as this replica shows it. The client stays the same
// through restarts; while the process is down its calls wait.
func (m *Member) Store() raftstore.Store { return m.store }

// PID is the process id, 0 when the replica is down.
func (m *Member) PID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.proc.running() {
		return 0
	}
	return m.proc.cmd.Process.Pid
}

// Lives counts the processes that this replica has had.
func (m *Member) Lives() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lives
}

// Running reports whether a process runs, be it paused.
func (m *Member) Running() bool { return m.PID() != 0 }

// Up reports whether a process runs, is not paused and is not being ended.
func (m *Member) Up() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.proc.running() && !m.proc.expected && !m.paused
}

// Start starts the replica's process and returns when it answers, which is
// before it has caught up. Starting one that runs does nothing.
func (m *Member) Start(ctx context.Context) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.PID() != 0 {
		return nil
	}
	p, err := m.launch()
	if err == nil {
		err = m.reach(ctx, p)
	}
	if err == nil {
		// A cable may have been cut or mended since it was launched.
		err = m.setLinks(ctx, m.group.linksOf(m.Name))
	}
	if err != nil {
		return fmt.Errorf("starting replica %s: %w%s", m.Name, err, m.lastWords())
	}
	return nil
}

func (m *Member) launch() (*process, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone {
		return nil, errors.New("it was removed from the group for good")
	}
	m.setup.Links = m.group.linksOf(m.Name)
	path := m.LogFile + ".setup"
	if err := m.setup.write(path); err != nil {
		return nil, err
	}
	// A socket that a killed process left would refuse the next one.
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
	// It dies with this process, also when it is paused and however this one ends.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	m.proc, m.paused = p, false
	m.lives++
	go m.bury(p)
	return p, nil
}

// bury waits for a process and notes how it ended if nobody had asked it to.
func (m *Member) bury(p *process) {
	p.err = p.cmd.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !p.expected {
		m.died = errors.Join(m.died, fmt.Errorf("replica %s ended by itself: %v%s", m.Name, p.err, m.lastWords()))
	}
	close(p.ended)
}

// reach waits until the new process answers.
func (m *Member) reach(ctx context.Context, p *process) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watched := make(chan struct{})
	defer close(watched)
	go func() {
		select {
		case <-p.ended:
			cancel(fmt.Errorf("its process ended: %v", p.err))
		case <-watched:
		}
	}()
	m.store.Reconnect()
	for {
		_, err := m.store.Admin().Status(ctx, new(storev1.AdminStatusRequest))
		if err == nil {
			return nil
		}
		// The connection to the process before it may be found dead only now.
		if err = remote.Err(err); ctx.Err() != nil || !errors.Is(err, raftstore.ErrUnavailable) {
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// Kill ends the process as a crash does (SIGKILL) and waits until it is gone.
func (m *Member) Kill() error { return m.end(syscall.SIGKILL) }

// Stop ends the process in an orderly way (SIGTERM).
func (m *Member) Stop() error { return m.end(syscall.SIGTERM) }

// endPatience is far beyond what a replica needs to end on a busy machine.
const endPatience = 30 * time.Second

func (m *Member) end(with syscall.Signal) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	p, paused := m.proc, m.paused
	if !p.running() {
		m.mu.Unlock()
		return nil
	}
	p.expected, m.paused = true, false
	m.mu.Unlock()
	err := m.signal(p, with)
	if paused && with != syscall.SIGKILL {
		err = errors.Join(err, m.signal(p, syscall.SIGCONT))
	}
	late := time.NewTimer(endPatience)
	defer late.Stop()
	select {
	case <-p.ended:
		if with == syscall.SIGTERM && p.err != nil {
			err = fmt.Errorf("stopping replica %s: %w%s", m.Name, p.err, m.lastWords())
		}
	case <-late.C:
		err = fmt.Errorf("replica %s does not stop within %s%s", m.Name, endPatience, m.lastWords())
		p.cmd.Process.Kill()
		<-p.ended
	}
	return err
}

func (m *Member) signal(p *process, s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("sending %s to replica %s: %w", s, m.Name, err)
	}
	return nil
}

// Pause stops the process where it is (SIGSTOP): it answers nothing, and
// nobody is told. Resume lets it go on.
func (m *Member) Pause() error { return m.freeze(syscall.SIGSTOP, true) }

// Resume undoes Pause.
func (m *Member) Resume(ctx context.Context) error {
	if err := m.freeze(syscall.SIGCONT, false); err != nil || !m.Up() {
		return err
	}
	return m.setLinks(ctx, m.group.linksOf(m.Name))
}

func (m *Member) freeze(s syscall.Signal, paused bool) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.proc.running() {
		return nil
	}
	m.paused = paused
	return m.signal(m.proc, s)
}

// Wipe takes away the data of a replica that is down. It is a new one under an
// old name then, and must be removed from the group before it starts.
func (m *Member) Wipe() error {
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.Running() {
		return fmt.Errorf("wiping replica %s, which runs", m.Name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.setup.Bootstrap = false
	return os.RemoveAll(m.DataDir)
}

// Ended is closed when the process last started has ended; nil before the first.
func (m *Member) Ended() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.proc == nil {
		return nil
	}
	return m.proc.ended
}

// Err tells of processes of this member that ended when nobody had asked them
// to, with their last words. Forgive forgets them, for one who expected it.
func (m *Member) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.died
}

// Forgive returns what Err would and forgets it.
func (m *Member) Forgive() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.died
	m.died = nil
	return err
}

// lastWords are the last lines of the log file.
func (m *Member) lastWords() string {
	const lines = 12
	b, err := os.ReadFile(m.LogFile)
	if err != nil {
		return ""
	}
	all := strings.Split(strings.TrimSpace(string(b)), "\n")
	return "\n\t" + strings.Join(all[max(0, len(all)-lines):], "\n\t")
}

// Status is the replica's view of the group; ready says whether it has caught up.
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

// Hash is the digest of the replica's state and the revision that it is of.
func (m *Member) Hash(ctx context.Context) (raftstore.Revision, string, error) {
	resp, err := m.store.Admin().Hash(ctx, new(storev1.AdminHashRequest))
	if err != nil {
		return 0, "", fmt.Errorf("hash of %s: %w", m.Name, remote.Err(err))
	}
	return raftstore.Revision(resp.GetRevision()), fmt.Sprintf("%x", resp.GetHash()), nil
}

// Snapshot makes the replica write a snapshot and shorten its log.
func (m *Member) Snapshot(ctx context.Context) error {
	_, err := m.store.Admin().Snapshot(ctx, new(storev1.AdminSnapshotRequest))
	return m.did("snapshot on", err)
}

// Compact makes the group forget history up to and including a revision. This
// replica must lead.
func (m *Member) Compact(ctx context.Context, upTo raftstore.Revision) error {
	_, err := m.store.Admin().Compact(ctx, &storev1.AdminCompactRequest{Revision: uint64(upTo)})
	return m.did("compaction on", err)
}

// Transfer makes the replica, which must lead, hand leadership over.
func (m *Member) Transfer(ctx context.Context) error {
	_, err := m.store.Admin().Transfer(ctx, new(storev1.AdminTransferRequest))
	return m.did("transfer from", err)
}

// AddMember makes other a member of the group, through this replica.
func (m *Member) AddMember(ctx context.Context, other *Member) error {
	_, err := m.store.Admin().AddMember(ctx, &storev1.AddMemberRequest{Id: other.Name, Address: other.Address})
	return m.did("adding "+other.Name+" through", err)
}

// RemoveMember takes other out of the group, through this replica. Its process runs on.
func (m *Member) RemoveMember(ctx context.Context, other *Member) error {
	_, err := m.store.Admin().RemoveMember(ctx, &storev1.RemoveMemberRequest{Id: other.Name})
	return m.did("removing "+other.Name+" through", err)
}

// ClockOffset sets how far the replica's clock is ahead of the machine's, now
// and after its next start. Negative is behind.
func (m *Member) ClockOffset(ctx context.Context, offset time.Duration) error {
	m.mu.Lock()
	m.setup.Clock = offset
	m.mu.Unlock()
	if !m.Up() {
		return nil
	}
	_, err := m.store.Admin().SetClock(ctx, &storev1.AdminClock{OffsetMs: offset.Milliseconds()})
	return m.did("clock of", err)
}

func (m *Member) did(what string, err error) error {
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
	return m.did("links of", err)
}
