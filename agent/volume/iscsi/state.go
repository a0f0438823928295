package iscsi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"keelson.dev/keelson/internal/durable"
)

// stateFile is in the folder that a target has for an interface.
const stateFile = "target.json"

// State is what was done for a target, by one interface: written before it is done, so that it is undone whatever happens.
type State struct {
	Version       int    `json:"version"`
	Target        string `json:"target"`
	Interface     string `json:"interface"`
	MadeInterface bool   `json:"madeInterface,omitempty"`
	// Portals are those at which this node was logged in, or is about to be.
	Portals map[string]PortalState `json:"portals,omitempty"`
}

// PortalState is what was done at a portal.
type PortalState struct {
	Group      int  `json:"group"`                // of portals
	MadeRecord bool `json:"madeRecord,omitempty"` // in iscsiadm's records; false: it was there
	// Name is the target's where the portal writes it otherwise: what it is logged in to by, and called in iscsiadm's records.
	Name string `json:"name,omitempty"`
	// Asked is since when a login is asked for of which nobody has heard how it ended: iscsid may be about it still.
	Asked *time.Time `json:"asked,omitempty"`
}

// load reads the state in a folder; a fresh one where there is none.
func load(dir string) (State, error) {
	s := State{Version: 1, Portals: map[string]PortalState{}}
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("state of an iSCSI target, %s: %w", filepath.Join(dir, stateFile), err)
	}
	if s.Portals == nil {
		s.Portals = map[string]PortalState{}
	}
	return s, nil
}

func (s State) save(dir string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, stateFile), b)
}

// portals are those of the state whose names can be read.
func (s State) portals() map[netip.AddrPort]PortalState {
	out := map[netip.AddrPort]PortalState{}
	for name, p := range s.Portals {
		if at, err := ParsePortal(name); err == nil {
			out[at] = p
		}
	}
	return out
}
