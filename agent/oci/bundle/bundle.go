// Package bundle is what the agent hands to keelson-oci: a request per process, as
// a file, and the answer. It is shared by both and holds no behaviour but the
// lookup of users, which needs the root file system that only keelson-oci sees.
package bundle

import specs "github.com/opencontainers/runtime-spec/specs-go"

// Create is the request for a container.
type Create struct {
	ID        string      `json:"id"`
	StateRoot string      `json:"stateRoot"` // where libcontainer keeps its state
	Spec      *specs.Spec `json:"spec"`      // Process.User is filled in from User
	Overlay   *Overlay    `json:"overlay,omitempty"`
	User      User        `json:"user"`
	// DefaultSeccomp asks for the runtime's own profile.
	DefaultSeccomp bool `json:"defaultSeccomp,omitempty"`
	// Volumes maps folders of the image to empty host folders that shall hold their
	// content and be mounted over them.
	Volumes map[string]string `json:"volumes,omitempty"`
}

// Overlay is the root file system, mounted at Spec.Root.Path in the container's
// own mount namespace: no trace of it is left on the host when the container dies.
type Overlay struct {
	Lower []string `json:"lower"` // topmost first
	Upper string   `json:"upper"`
	Work  string   `json:"work"`
}

// User says who the container's process shall be. ID wins over Name, and that
// over Image.
type User struct {
	ID     *int64  `json:"id,omitempty"`
	Name   string  `json:"name,omitempty"`
	Image  string  `json:"image,omitempty"` // as in an image config: user[:group]
	Group  *int64  `json:"group,omitempty"`
	Groups []int64 `json:"groups,omitempty"`
	Strict bool    `json:"strict,omitempty"` // no groups from the image's /etc/group
}

// Exec is the request for one more process in a container.
type Exec struct {
	ID        string         `json:"id"`
	StateRoot string         `json:"stateRoot"`
	Process   *specs.Process `json:"process"`
}

// Answer is what keelson-oci found out while creating.
type Answer struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"`
}
