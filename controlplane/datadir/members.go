package datadir

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Members reads who was a member when this replica last knew: name → peer address.
func (d Dir) Members() (map[string]string, error) {
	var out map[string]string
	_, err := ReadJSON(filepath.Join(d.Path, MembersFile), &out)
	return out, err
}

// HasRaftData says whether this replica's disk holds anything of the group.
func (d Dir) HasRaftData() (bool, error) {
	files, err := os.ReadDir(filepath.Join(d.Path, RaftFolder))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return len(files) > 0, err
}

// IsJoining says whether this replica's log may begin with the group's first day: it is to become a member, or is one and has never
// had all that the group has.
func (d Dir) IsJoining() (bool, error) {
	for _, name := range []string{PeersFile, NewcomerFile} {
		switch _, err := os.Stat(filepath.Join(d.Path, name)); {
		case err == nil:
			return true, nil
		case !errors.Is(err, fs.ErrNotExist):
			return false, err
		}
	}
	return false, nil
}

// IsFounder says whether this replica made the cluster, and so begins its raft group.
func (d Dir) IsFounder() bool {
	_, err := os.Stat(filepath.Join(d.Path, FounderFile))
	return !errors.Is(err, os.ErrNotExist)
}

// StandbyRecord is what lies in StandbyFile.
type StandbyRecord struct {
	Version int `json:"version"`
}

const StandbyVersion = 1

func (d Dir) JoinedAsStandby() (bool, error) {
	var rec StandbyRecord
	found, err := ReadJSON(filepath.Join(d.Path, StandbyFile), &rec)
	return found, err
}
