package replica

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

// State is what the data directory of a replica that is stopped holds: its newest
// snapshot and the whole log after it, the end of which may never have been
// committed. c needs Name, DataDir, and Keys where the data is sealed. Nothing is
// changed but what a start would change.
func State(c Config) (*mvcc.View, error) {
	bad := func(err error) (*mvcc.View, error) { return nil, fmt.Errorf("reading %s: %w", c.DataDir, err) }
	c = c.withDefaults()
	if _, err := os.Stat(c.DataDir); err != nil { // opening the disk would make it
		return nil, err
	}
	d, err := disk.Open(c.Disk(), func(error) {})
	if err != nil {
		return bad(err)
	}
	defer d.Close()
	var failed error
	machine := newFSM(context.Background(), func(err error) { failed = errors.Join(failed, err) })
	defer machine.hub.Close()
	machine.committed, machine.changed = func(uint64, uint64) {}, func(*mvcc.View) {}
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
		return bad(fmt.Errorf("its log begins at entry %d, and what it has besides ends before %d", first, next))
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
	return machine.view(), nil
}
