package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/internal/durable"
)

// CreateVolume writes a record ROOT/.volumes/ID.json before it creates anything, and again when the
// volume is complete. The data are in the file ROOT/.images/ID. Folders with a size are described
// in directory.go. Behind a PersistentVolume that was written by hand, there was no CreateVolume
// and there is no record: such a volume is the folder ROOT/ID, without a size. A snapshot is the
// file ROOT/.snapshots/ID with a record beside it.
const (
	recordsDir   = ".volumes"
	imagesDir    = ".images"
	snapshotsDir = ".snapshots"
)

// recordVersion is the version of records of folders; records of images have version 0. A record
// with a higher version is not supported, and its volume is left alone.
const recordVersion = 1

// errNewerRelease is returned for an unsupported record. Its size and project ID are read
// nevertheless.
var errNewerRelease = errors.New("written by a later release")

// volumeRecord is the record of a volume or snapshot. Fields of later releases are ignored.
type volumeRecord struct {
	Version     int   `json:"version,omitempty"` // 0: an image
	Size        int64 `json:"size"`              // bytes
	Ready       bool  `json:"ready,omitempty"`   // false: it is unfinished, and will be created again
	Block       bool  `json:"block,omitempty"`   // a block device, without a file system of the driver
	Initialized bool  `json:"used,omitempty"`    // it was staged once, and its root is initialized

	// Of folders.
	Backing string `json:"backing,omitempty"` // "" = image
	Project uint32 `json:"project,omitempty"` // project ID of its quota

	// Of what was made of something else, and of snapshots.
	SourceVolume   string `json:"from,omitempty"`       // source volume
	SourceSnapshot string `json:"fromRecord,omitempty"` // source snapshot
	Shared         bool   `json:"shared,omitempty"`     // it may share blocks with its source
	CreatedAt      int64  `json:"made,omitempty"`       // creation time of a snapshot in Unix nanoseconds
	Group          string `json:"group,omitempty"`      // group of a snapshot
}

func (d *Driver) recordFile(id string) string {
	return filepath.Join(d.cfg.Root, recordsDir, id+".json")
}
func (d *Driver) imageFile(id string) string { return filepath.Join(d.cfg.Root, imagesDir, id) }

// readVolume returns the record of a volume; ok is false if none exists.
func (d *Driver) readVolume(id string) (r volumeRecord, ok bool, err error) {
	if r, ok, err = readRecord(d.recordFile(id)); err != nil {
		return volumeRecord{}, false, fmt.Errorf("record of volume %s: %w", id, err)
	}
	return r, ok, nil
}

// readRecord reads a record; ok is false if none exists.
func readRecord(path string) (r volumeRecord, ok bool, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return volumeRecord{}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err == nil && r.Version > recordVersion {
		return r, true, fmt.Errorf("%s is of version %d, %w: this one reads versions up to %d", path, r.Version, errNewerRelease, recordVersion)
	}
	return r, err == nil, err
}

func (d *Driver) writeVolume(id string, r volumeRecord) error {
	if err := writeRecord(d.recordFile(id), r); err != nil {
		return fmt.Errorf("record of volume %s: %w", id, err)
	}
	return nil
}

func writeRecord(path string, r volumeRecord) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.Write(path, b)
}

// reservedBytes returns the size of all volumes and snapshots, and the part of it for which the
// disk has not allocated blocks yet. Images that may share blocks, and the unused part of folders,
// are not allocated.
func (d *Driver) reservedBytes() (sum, open int64, err error) {
	shares := d.quotas.mayShareBlocks(d.cfg.Root)
	err = d.eachRecord(func(_ string, r volumeRecord) {
		sum += r.Size
		switch {
		case r.Shared || r.Version > recordVersion:
			open += r.Size
		case r.Backing == backingDirectory:
			open += r.Size
			if u, err := d.quotas.usageOf(d.cfg.Root, r.Project); err == nil && !shares {
				open -= min(r.Size, u.bytes)
			}
		}
	})
	if err != nil {
		return 0, 0, err
	}
	deleted, err := d.trashedProjects()
	for _, p := range deleted { // its space is used until it is removed
		if u, err := d.quotas.usageOf(d.cfg.Root, p); err == nil {
			sum += u.bytes
		}
	}
	return sum, open, err
}
