package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/internal/durable"
)

// Folders below the root folder ROOT. The record of a volume is .volumes/ID.json, and its backing
// file is .images/ID. A snapshot is the file .snapshots/ID with a record beside it.
//
// CreateVolume writes the record before it creates anything, and again when the volume is complete.
// Volumes that are folders are described in directory.go. A volume of a PersistentVolume that was
// written by hand has no record: it is the folder ROOT/ID, without a size limit.
const (
	recordsDir   = ".volumes"
	imagesDir    = ".images"
	snapshotsDir = ".snapshots"
)

// recordVersion is the version of the records of folders; records of backing files have version 0.
// If a record has a higher version, the driver does not change its volume.
const recordVersion = 1

// errNewerRelease is returned for a record with a version above recordVersion, together with its
// known fields.
var errNewerRelease = errors.New("written by a later release")

// volumeRecord is the JSON record of a volume or a snapshot. Unknown fields are ignored.
type volumeRecord struct {
	Version     int   `json:"version,omitempty"` // 0: backing file
	Size        int64 `json:"size"`              // bytes
	Ready       bool  `json:"ready,omitempty"`   // false: unfinished, and created again
	Block       bool  `json:"block,omitempty"`   // the volume is a block device
	Initialized bool  `json:"used,omitempty"`    // stageImage has initialized the root

	// Only of volumes that are folders.
	Backing string `json:"backing,omitempty"` // backingDirectory; "": a backing file
	Project uint32 `json:"project,omitempty"` // project ID of the folder

	// Only of snapshots, and of volumes that were created from a snapshot or a volume.
	SourceVolume   string `json:"from,omitempty"`       // ID of the source, a volume
	SourceSnapshot string `json:"fromRecord,omitempty"` // ID of the source, a snapshot
	Shared         bool   `json:"shared,omitempty"`     // blocks may be shared with the source
	CreatedAt      int64  `json:"made,omitempty"`       // of a snapshot, in Unix nanoseconds
	Group          string `json:"group,omitempty"`      // ID of the snapshot's group
}

// volumeStore reads and writes the records of volumes, snapshots, and groups of snapshots below the
// root folder, and removes their files. The caller must hold the lock of the volume, snapshot or
// group.
type volumeStore struct {
	cfg *Config
}

func (s *volumeStore) recordFile(id string) string {
	return filepath.Join(s.cfg.Root, recordsDir, id+".json")
}
func (s *volumeStore) imageFile(id string) string { return filepath.Join(s.cfg.Root, imagesDir, id) }

// readVolume returns the record of the volume with this ID. ok is false if it has no record.
func (s *volumeStore) readVolume(id string) (r volumeRecord, ok bool, err error) {
	if r, ok, err = readRecord(s.recordFile(id)); err != nil {
		return volumeRecord{}, false, fmt.Errorf("record of volume %s: %w", id, err)
	}
	return r, ok, nil
}

// readRecord returns the record in the file at path. ok is false if the file does not exist. If a
// later release has written the record, readRecord returns the known fields and errNewerRelease.
func readRecord(path string) (r volumeRecord, ok bool, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return volumeRecord{}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err == nil && r.Version > recordVersion {
		return r, true, fmt.Errorf("%s is of version %d, %w: this one reads versions up to %d", path, r.Version,
			errNewerRelease, recordVersion)
	}
	return r, err == nil, err
}

func (s *volumeStore) writeVolume(id string, r volumeRecord) error {
	if err := writeRecord(s.recordFile(id), r); err != nil {
		return fmt.Errorf("record of volume %s: %w", id, err)
	}
	return nil
}

func writeRecord(path string, r volumeRecord) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.WriteIfChanged(path, b, durable.Intact)
}

// reservedBytes returns the total size of all volumes, snapshots, and deleted folders. unallocated
// is the part of this size that has no allocated blocks on the disk. It consists of the size of
// files that may share blocks, and of the unused size of folders.
func (s *diskSpace) reservedBytes() (sum, unallocated int64, err error) {
	shares := s.folders.quotas.mayShareBlocks(s.cfg.Root)
	err = s.store.eachRecord(func(_ string, r volumeRecord) {
		sum += r.Size
		switch {
		case r.Shared || r.Version > recordVersion:
			unallocated += r.Size
		case r.Backing == backingDirectory:
			unallocated += r.Size
			if u, err := s.folders.quotas.usageOf(s.cfg.Root, r.Project); err == nil && !shares {
				unallocated -= min(r.Size, u.bytes)
			}
		}
	})
	if err != nil {
		return 0, 0, err
	}
	deleted, err := s.folders.trashedProjects()
	for _, p := range deleted { // deleted folders use their space until they are removed
		if u, err := s.folders.quotas.usageOf(s.cfg.Root, p); err == nil {
			sum += u.bytes
		}
	}
	return sum, unallocated, err
}
