package podfiles

import (
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
)

// confirmation is the content of a file in the run directory. The file records that a control plane
// has confirmed which pods are assigned to this node, since the machine was booted. Fields may be
// added: unknown fields are ignored.
type confirmation struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
}

const confirmationVersion = 1

// ConfirmationFile returns the path of the confirmation file.
func ConfirmationFile(paths agent.Paths) string {
	return filepath.Join(paths.Run, "assignment-confirmed.json")
}

// WasConfirmedInBoot reports whether a control plane has confirmed the node's assigned pods since
// the machine was booted, to this agent process or to an earlier one. It returns false and an error
// for the log if the file cannot be read.
func WasConfirmedInBoot(paths agent.Paths, bootID string) (confirmed bool, err error) {
	var record confirmation
	err = durable.ReadJSON(ConfirmationFile(paths), &record)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && record.Boot == bootID, err
}

// SaveConfirmation records that a control plane has confirmed the node's assigned pods in this
// boot.
func SaveConfirmation(paths agent.Paths, bootID string) error {
	data, err := json.Marshal(confirmation{Version: confirmationVersion, Boot: bootID})
	if err != nil {
		return err
	}
	return durable.WriteIfChanged(ConfirmationFile(paths), data, durable.Intact)
}
