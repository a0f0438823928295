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
	"keelson.dev/keelson/raftstore/replica/raftfsm"
)

// ErrNothingToRecover is returned for a data directory that contains no raft cluster.
var ErrNothingToRecover = errors.New("raftstore: data directory contains no raft cluster to recover")

// Recover makes a stopped replica the only member of its raft cluster. It is meant for a permanent
// loss of the majority. UNSAFE: commits that only the lost replicas had are lost, although they
// were acknowledged. If the lost replicas still run, two raft clusters exist afterwards. c needs
// Name, DataDir and Advertise.
//
// All entries of this replica's log count as committed. The revision is raised far, as by a
// restore. A watcher therefore never receives a lost revision again with different content. The
// raft cluster gets a new identity, so that messages of previous members are refused. Previous
// members must be added again with an empty data directory.
//
// Run it on one replica only: the replica with the newest state. It can be run again after an
// interruption. amend returns additional changes to the state; nil means none.
func Recover(c Config, amend func(*mvcc.View) ([]raftstore.Op, error)) error {
	if c.Name == "" || c.Storage.DataDir == "" || c.Network.Advertise == "" {
		return errors.New("recover: name, data directory and advertised address are needed")
	}
	c = c.withDefaults()
	// checked first, because opening the disk would create it
	if list, err := os.ReadDir(c.Storage.DataDir); errors.Is(err, os.ErrNotExist) || err == nil && len(list) == 0 {
		return fmt.Errorf("recover: %s: %w", c.Storage.DataDir, ErrNothingToRecover)
	}
	d, err := disk.Open(c.Disk(), func(error) {})
	if err != nil {
		return fmt.Errorf("recover: %w", err)
	}
	defer d.Close()
	switch empty, err := d.IsEmpty(); {
	case err != nil:
		return fmt.Errorf("recover: %w", err)
	case empty:
		return fmt.Errorf("recover: %s: %w", c.Storage.DataDir, ErrNothingToRecover)
	}
	c.Logger.Warn(
		"RECOVERING FROM A LOST MAJORITY: this replica becomes the only member; "+
			"commits that only the lost replicas had are lost",
		"replica", c.Name, "data", c.Storage.DataDir)
	// The identity is written first: after an interruption the previous members are refused
	// already, and a second run completes the recovery.
	id, err := d.CreateRaftClusterID()
	if err != nil {
		return fmt.Errorf("recover: %w", err)
	}
	group := raft.Configuration{Servers: []raft.Server{
		{ID: raft.ServerID(c.Name), Address: raft.ServerAddress(c.Network.Advertise)}}}
	// raft uses the transport only to find addresses in old formats
	_, trans := raft.NewInmemTransport(raft.ServerAddress(c.Network.Advertise))
	defer trans.Close()
	var failed error
	machine := raftfsm.New(context.Background(), func(err error) { failed = errors.Join(failed, err) })
	defer machine.Hub.Close()
	machine.Cluster = c.Cluster
	state := &amendedFSM{FSM: machine, amend: amend}
	err = raft.RecoverCluster(c.raftConfig(make(chan bool, 1)), state, d.Log, d.StableStore(), d.Snapshots,
		trans, group)
	if err = errors.Join(err, failed); err != nil {
		return fmt.Errorf("recover %s: %w", c.Storage.DataDir, err)
	}
	v := machine.View()
	c.Logger.Warn("RECOVERED: start this replica, then add new ones with empty data directories",
		"replica", c.Name, "group", id, "was", state.was, "revision", v.Revision(), "keys", v.Keys())
	return nil
}

// amendedFSM is a state machine that applies the additional changes of Recover and raises the
// revision when it takes its snapshot.
type amendedFSM struct {
	*raftfsm.FSM
	was   raftstore.Revision
	amend func(*mvcc.View) ([]raftstore.Op, error)
}

// Snapshot implements raft.FSM.
func (s *amendedFSM) Snapshot() (raft.FSMSnapshot, error) {
	m := s.Machine.Load()
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
	return s.FSM.Snapshot()
}

// State returns the content of the data directory of a stopped replica: its newest snapshot and the
// whole log after it. Entries at the end of the log may not have been committed. c needs Name,
// DataDir, and Keys if the data is encrypted. State changes in the directory only what a start of
// the replica would change.
func State(c Config) (*mvcc.View, error) {
	bad := func(err error) (*mvcc.View, error) { return nil, fmt.Errorf("reading %s: %w", c.Storage.DataDir, err) }
	c = c.withDefaults()
	if _, err := os.Stat(c.Storage.DataDir); err != nil { // opening the disk would create it
		return nil, err
	}
	d, err := disk.Open(c.Disk(), func(error) {})
	if err != nil {
		return bad(err)
	}
	defer d.Close()
	var failed error
	machine := raftfsm.New(context.Background(), func(err error) { failed = errors.Join(failed, err) })
	defer machine.Hub.Close()
	list, err := d.Snapshots.List()
	if err != nil {
		return bad(err)
	}
	next := uint64(1)
	if len(list) > 0 {
		_, content, err := d.Snapshots.Open(list[0].ID)
		if err == nil {
			err = machine.Restore(content)
		}
		if err != nil {
			return bad(err)
		}
		next = list[0].Index + 1
	}
	first, err := d.Log.FirstIndex()
	if err != nil {
		return bad(err)
	}
	last, err := d.Log.LastIndex()
	if err != nil {
		return bad(err)
	}
	if last >= next && first > next {
		return bad(fmt.Errorf("its log starts at entry %d, and its snapshot ends before entry %d", first, next))
	}
	for ; next <= last; next++ {
		var l raft.Log
		if err := d.Log.GetLog(next, &l); err != nil {
			return bad(err)
		}
		machine.Apply(&l)
	}
	if failed != nil {
		return bad(failed)
	}
	return machine.View(), nil
}
