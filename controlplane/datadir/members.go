package datadir

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Members returns the last known members of the raft cluster: their peer addresses by their names.
func (d Dir) Members() (map[string]string, error) {
	var out map[string]string
	_, err := ReadJSON(filepath.Join(d.Path, MembersFile), &out)
	return out, err
}

// HasRaftData reports whether the data directory contains raft data.
func (d Dir) HasRaftData() (bool, error) {
	files, err := os.ReadDir(filepath.Join(d.Path, RaftFolder))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return len(files) > 0, err
}

// IsJoining reports whether this replica is joining the cluster, or is a new member that has not
// caught up with the leader yet. Only in these cases its raft log may start at the first entry of
// the cluster.
func (d Dir) IsJoining() (bool, error) {
	for _, name := range []string{PeersFile, NewMemberFile} {
		switch _, err := os.Stat(filepath.Join(d.Path, name)); {
		case err == nil:
			return true, nil
		case !errors.Is(err, fs.ErrNotExist):
			return false, err
		}
	}
	return false, nil
}

// IsFounder reports whether this replica created the cluster, and therefore bootstraps the raft
// cluster.
func (d Dir) IsFounder() bool {
	_, err := os.Stat(filepath.Join(d.Path, FounderFile))
	return !errors.Is(err, os.ErrNotExist)
}

// StandbyRecord is the content of StandbyFile.
type StandbyRecord struct {
	Version int `json:"version"`
}

const StandbyVersion = 1

func (d Dir) JoinedAsStandby() (bool, error) {
	var rec StandbyRecord
	found, err := ReadJSON(filepath.Join(d.Path, StandbyFile), &rec)
	return found, err
}
