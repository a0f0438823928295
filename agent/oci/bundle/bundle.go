// Package bundle defines the interface between the agent and keelson-oci: one request file per
// process, and the response. Its only function looks up users, which requires the container's root
// file system. Only keelson-oci can read that file system.
package bundle

import specs "github.com/opencontainers/runtime-spec/specs-go"

// Create is the request to create a container.
type Create struct {
	ID        string      `json:"id"`
	StateRoot string      `json:"stateRoot"` // libcontainer's state directory
	Spec      *specs.Spec `json:"spec"`      // OCI specification; keelson-oci sets Process.User from User
	Overlay   *Overlay    `json:"overlay,omitempty"`
	User      User        `json:"user"`
	// DefaultSeccomp applies the runtime's default seccomp profile.
	DefaultSeccomp bool `json:"defaultSeccomp,omitempty"`
	// Volumes maps directories of the image to empty host directories. keelson-oci copies the
	// image's content into each host directory. Spec has mounts of the host directories over the
	// image's directories.
	Volumes map[string]string `json:"volumes,omitempty"`
}

// Overlay is the root file system. It is mounted at Spec.Root.Path in the container's own mount
// namespace, so the mount disappears with the container's last process.
type Overlay struct {
	Lower []string `json:"lower"` // topmost first
	Upper string   `json:"upper"`
	Work  string   `json:"work"`
}

// User specifies the user of the container's process. ID takes precedence over Name, and Name takes
// precedence over Image.
type User struct {
	ID     *int64  `json:"id,omitempty"`
	Name   string  `json:"name,omitempty"`
	Image  string  `json:"image,omitempty"` // user in the form of an image config: user[:group]
	Group  *int64  `json:"group,omitempty"`
	Groups []int64 `json:"groups,omitempty"`
	Strict bool    `json:"strict,omitempty"` // ignore the image's /etc/group
}

// Exec is the request to run another process in a container.
type Exec struct {
	ID        string         `json:"id"`
	StateRoot string         `json:"stateRoot"`
	Process   *specs.Process `json:"process"`
}

// ResolvedUser is the numeric user and groups of a created container's process.
type ResolvedUser struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"`
}
