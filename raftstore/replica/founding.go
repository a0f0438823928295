package replica

import "fmt"

// settledDisk opens the disk of a replica that is to run: nothing is built on
// what a power cut could take away.
func (r *Replica) settledDisk() (*disk, error) {
	if r.cfg.NoSync {
		return openDisk(r.cfg, r.fail)
	}
	if err := settleData(r.cfg.DataDir); err != nil {
		return nil, fmt.Errorf("disk of replica %s: %w", r.cfg.Name, err)
	}
	d, err := openDisk(r.cfg, r.fail)
	if err != nil {
		return nil, err
	}
	// What was made in it now.
	if err := syncFolder(r.cfg.DataDir); err != nil {
		d.close.Close()
		return nil, fmt.Errorf("disk of replica %s: %w", r.cfg.Name, err)
	}
	return d, nil
}

// startOver lets a founding be done again that a crash cut short. raft writes
// its first term before the configuration of the group; with a term and
// without a configuration it would wait for ever to be called by a leader.
// Whoever has voted or heard of a leader has a later term.
func (d *disk) startOver() error {
	last, err := d.logs.LastIndex()
	if err != nil || last != 0 {
		return err
	}
	list, err := d.snapshots.List()
	if err != nil || len(list) != 0 {
		return err
	}
	values := d.stable.record().values
	if term, err := d.stable.GetUint64(keyTerm); err != nil || term != 1 || len(values[keyVoteTerm]) != 0 {
		return nil
	}
	if err := d.stable.SetUint64(keyTerm, 0); err != nil {
		return fmt.Errorf("founding the group again: %w", err)
	}
	return nil
}

// Keys that raft uses in the stable store.
const keyVoteTerm = "LastVoteTerm"

var keyTerm = []byte("CurrentTerm")
