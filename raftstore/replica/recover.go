package replica

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

// ErrNothingToRecover reports a data directory without the data of a group.
var ErrNothingToRecover = errors.New("raftstore: data directory holds no group to recover")

// Recover makes this replica the only member of its group, for when a majority
// of the voters is lost for good and nothing else helps. UNSAFE: what only the
// lost replicas had is gone, although it was acknowledged; and should they still
// run somewhere, there are two groups from now on. It works on the data
// directory of a replica that is stopped; c needs Name, DataDir and Advertise.
//
// Everything in this replica's log counts as committed. The revision moves far
// ahead, as with Restore, so that no watcher is shown a revision of the lost
// time with other content. The group gets a new identity: members of the old one
// that come back are not heard; to be members again they must be added with an
// empty data directory.
//
// Run it on one replica only: the one with the newest state. It can be run
// again when it was interrupted. amend says what else is changed of the state;
// nil = nothing.
func Recover(c Config, amend func(*mvcc.View) ([]raftstore.Op, error)) error {
	if c.Name == "" || c.DataDir == "" || c.Advertise == "" {
		return errors.New("recover: name, data directory and advertised address are needed")
	}
	c = c.withDefaults()
	// Looked at first: opening the disk would make it.
	if list, err := os.ReadDir(c.DataDir); errors.Is(err, os.ErrNotExist) || err == nil && len(list) == 0 {
		return fmt.Errorf("recover: %s: %w", c.DataDir, ErrNothingToRecover)
	}
	d, err := disk.Open(c.Disk(), func(error) {})
	if err != nil {
		return fmt.Errorf("recover: %w", err)
	}
	defer d.Close()
	switch empty, err := d.Empty(); {
	case err != nil:
		return fmt.Errorf("recover: %w", err)
	case empty:
		return fmt.Errorf("recover: %s: %w", c.DataDir, ErrNothingToRecover)
	}
	c.Logger.Warn("RECOVERING FROM A LOST MAJORITY: this replica becomes the only member; commits that only the lost replicas had are gone",
		"replica", c.Name, "data", c.DataDir)
	// The identity first: were this cut short, the old members are not heard
	// already, and running it again completes it.
	id, err := d.Found()
	if err != nil {
		return fmt.Errorf("recover: %w", err)
	}
	group := raft.Configuration{Servers: []raft.Server{{ID: raft.ServerID(c.Name), Address: raft.ServerAddress(c.Advertise)}}}
	// The transport would only be asked for addresses by formats of old.
	_, trans := raft.NewInmemTransport(raft.ServerAddress(c.Advertise))
	defer trans.Close()
	var failed error
	machine := newFSM(context.Background(), func(err error) { failed = errors.Join(failed, err) })
	defer machine.hub.Close()
	machine.cluster = c.Cluster
	machine.committed, machine.changed = func(uint64, uint64) {}, func(*mvcc.View) {}
	state := &recovered{fsm: machine, amend: amend}
	err = raft.RecoverCluster(c.raft(make(chan bool, 1)), state, d.Log, d.Votes(), d.Snapshots, trans, group)
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("recover %s: %w", c.DataDir, err)
	}
	v := machine.view()
	c.Logger.Warn("RECOVERED: start this replica, then add new ones with empty data directories",
		"replica", c.Name, "group", id, "was", state.was, "revision", v.Revision(), "keys", v.Keys())
	return nil
}

// recovered is the state machine whose last act before its snapshot is to amend
// its state and to move the revision ahead.
type recovered struct {
	*fsm
	was   raftstore.Revision
	amend func(*mvcc.View) ([]raftstore.Op, error)
}

// Snapshot implements raft.FSM.
func (s *recovered) Snapshot() (raft.FSMSnapshot, error) {
	m := s.machine.Load()
	s.was = m.View().Revision()
	if s.amend != nil {
		ops, err := s.amend(m.View())
		if err != nil {
			return nil, err
		}
		m.Amend(ops...)
	}
	if err := m.Rebase(disk.RestoreBase(m.View().Revision(), time.Now())); err != nil {
		return nil, err
	}
	return s.fsm.Snapshot()
}
