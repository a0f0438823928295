package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"

	"keelson.dev/keelson/controlplane/api"
)

// The feature level of a cluster determines in which formats its replicas may write stored data. A
// release can read every format up to its own level. A format is written only after every replica
// has reported that it can read the format. The level is in the store, so that backups include it.
// The leader raises the level, and nothing lowers it.
//
// 0  formats before feature levels existed
// 1  managedFields in format 1 (registry/fieldowners/shortform.go)
// 2  rotation records (keyrotation/rotation)
// 3  pods that require features of their node (api/nodefeatures)
//
// Level 2 is needed because a release that cannot rotate a kind of key would use the previous key.
// Level 3 is needed because the scheduler of an earlier release would bind such a pod to a node
// without the features.
const (
	FeatureLevel      = 3 // the highest level that this release supports
	LevelShortFields  = 1
	LevelRotation     = 2
	LevelNodeFeatures = 3
)

const (
	// LevelKey is the key of the LevelRecord in the store.
	LevelKey      = api.StorageRoot + "keelson.dev/feature-level"
	maxLevelBytes = 4 << 10 // maximum size of the stored record, in bytes
)

// LevelRecord is the stored feature level of the cluster. It is in the store and in LevelFile.
// Later releases may add fields: unknown fields are ignored, and Level has the same meaning in
// every version.
type LevelRecord struct {
	Version int    `json:"version"`
	Level   uint32 `json:"level"`
	Release string `json:"release,omitempty"` // the release that raised the level; shown in messages
}

const LevelRecordVersion = 1

func DecodeLevel(raw []byte) (LevelRecord, error) {
	var rec LevelRecord
	if len(raw) > maxLevelBytes {
		return rec, fmt.Errorf("the stored feature level (%s): a record of %d bytes", LevelKey, len(raw))
	}
	if err := json.Unmarshal(raw, &rec); err != nil {
		return rec, fmt.Errorf("the stored feature level (%s): %w", LevelKey, err)
	}
	return rec, nil
}

// ErrLevelTooHigh is returned if this release does not support the feature level of the cluster, so
// that it cannot read the stored data.
var ErrLevelTooHigh = errors.New("this release is too old for what is stored")

// ErrLevelTooLow is returned if a request needs a higher feature level than the cluster has.
var ErrLevelTooLow = errors.New("the cluster is at level")

// CheckSupported returns ErrLevelTooHigh if the level of the record is above supported, the highest
// level that this release supports.
func (rec LevelRecord) CheckSupported(supported uint32) error {
	if rec.Level <= supported {
		return nil
	}
	by := ""
	if rec.Release != "" {
		by = ", raised by release " + rec.Release
	}
	return fmt.Errorf("%w: the cluster stores forms of feature level %d%s, and this release understands "+
		"levels up to %d: "+
		"start the release that the other replicas run, or one after it", ErrLevelTooHigh, rec.Level, by, supported)
}

// SaveLevel writes the feature level to LevelFile in the data directory folder. A release that does
// not support the level reads this file before it opens the store, and does not start.
func SaveLevel(folder string, rec LevelRecord) error {
	if err := WriteJSON(filepath.Join(folder, LevelFile), rec); err != nil {
		return fmt.Errorf("writing the feature level: %w", err)
	}
	return nil
}

// CheckLevel returns an error if this release does not support the feature level in LevelFile.
func (d Dir) CheckLevel() error {
	var rec LevelRecord
	if _, err := ReadJSON(filepath.Join(d.Path, LevelFile), &rec); err != nil {
		return err
	}
	return rec.CheckSupported(d.FeatureLevel)
}
