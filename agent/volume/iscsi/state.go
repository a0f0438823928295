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

// stateFile is the name of the file with the State of a target, in the folder named by FolderName.
const stateFile = "target.json"

// State records the logins, interfaces and records that were created for a target through one
// interface. It is written to stateFile before each step, so that the step can be undone after a
// crash.
type State struct {
	Version       int    `json:"version"`
	Target        string `json:"target"`
	Interface     string `json:"interface"`
	MadeInterface bool   `json:"madeInterface,omitempty"`
	// Portals are those at which this node is logged in, or may be. Keys are address:port.
	Portals map[string]PortalState `json:"portals,omitempty"`
}

// PortalState records the login and the iscsiadm record at one portal of a target.
type PortalState struct {
	Group      int  `json:"group"`                // portal group tag
	MadeRecord bool `json:"madeRecord,omitempty"` // created in iscsiadm's records; false: the record existed
	// Name is the target's name as written by the portal, if it differs. It is used for the login
	// and in iscsiadm's records.
	Name string `json:"name,omitempty"`
	// Asked is the start of a login without a known result. iscsid may still complete it.
	Asked *time.Time `json:"asked,omitempty"`
}

// loadState reads the State from stateFile in the folder dir. It returns a new State if the file
// does not exist.
func loadState(dir string) (State, error) {
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

func (s State) saveTo(dir string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return durable.WriteIfChanged(filepath.Join(dir, stateFile), b, durable.Intact)
}

// parsedPortals returns the portals of the State by parsed address. It omits keys that cannot be
// parsed.
func (s State) parsedPortals() map[netip.AddrPort]PortalState {
	out := map[netip.AddrPort]PortalState{}
	for name, p := range s.Portals {
		if at, err := ParsePortal(name); err == nil {
			out[at] = p
		}
	}
	return out
}
