package oci

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/oci/bundle"
	"keelson.dev/keelson/internal/durable"
)

// recordVersion is the version in new records. A later release may add fields, but the meaning of a
// field never changes. Readers skip unknown fields and treat missing fields as zero, so each
// release can read the records of the others.
const recordVersion = 1

// sandboxRecord is the record of a sandbox on disk. It is written before any part of the sandbox is
// created, and again when the sandbox's state changes.
type sandboxRecord struct {
	Version  int          `json:"version"`
	ID       string       `json:"id"`
	State    SandboxState `json:"state"`
	Config   []byte       `json:"config"` // cri.PodSandboxConfig
	Handler  string       `json:"handler,omitempty"`
	Created  int64        `json:"created"`
	IPs      []string     `json:"ips,omitempty"`
	PausePID int          `json:"pausePID,omitempty"`
	ShimPID  int          `json:"shimPID,omitempty"`
	Boot     string       `json:"boot"` // boot ID of the machine when its processes were started
}

// containerRecord is the record of a container on disk. The shim stores how the container exited in
// a separate file.
type containerRecord struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	Sandbox string `json:"sandbox"`
	// creating, created or running, never exited: the shim's file records the exit
	State    ContainerState      `json:"state"`
	Config   []byte              `json:"config"`
	Created  int64               `json:"created"`
	Started  int64               `json:"started,omitempty"`
	ImageID  string              `json:"imageID"`
	ImageRef string              `json:"imageRef"`
	Cgroup   string              `json:"cgroup"`
	Log      string              `json:"log,omitempty"`
	Stop     int                 `json:"stop"`              // stop signal
	SharePID bool                `json:"sharePID"`          // the container's child processes survive its first process
	Process  *specs.Process      `json:"process,omitempty"` // template for exec
	User     bundle.ResolvedUser `json:"user"`

	// StartError is why the container cannot be started; empty if it can be started. A release
	// without this field finds no process of the container and marks it as exited.
	StartError string `json:"startError,omitempty"`
}

// replaceExitedState replaces the state exited by running. Records of earlier releases contain
// exited for a container that exited before its start was recorded, but not the exit code. With the
// state running, the reader looks for the exit code in the shim's file.
func (rec *containerRecord) replaceExitedState() {
	if rec.State == ContainerExited {
		rec.State = ContainerRunning
	}
}

// exitRecord records how a container exited: its exit code, when it started and exited (nanoseconds
// since
// 1970), and whether the kernel killed one of its processes for lack of memory.
type exitRecord struct {
	Code     int32
	Finished int64
	Started  int64
	OOM      bool
}

// newID returns 256 random bits as 64 hexadecimal digits, the length that log shippers expect in
// log file names.
func newID() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// saveJSON writes a record atomically. It does not sync the file, because the processes that the
// record describes do not survive a power failure either.
func saveJSON(path string, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if err := durable.Write(path, data, durable.Atomic); err != nil {
		return fmt.Errorf("save %s: %w", path, err)
	}
	return nil
}

func (l layout) saveSandbox(rec *sandboxRecord) error {
	rec.Version = recordVersion
	return saveJSON(filepath.Join(l.sandboxDir(rec.ID), "sandbox.json"), rec)
}

func (l layout) saveContainer(rec *containerRecord) error {
	rec.Version = recordVersion
	rec.replaceExitedState()
	return saveJSON(filepath.Join(l.containerDir(rec.ID), "container.json"), rec)
}

func decodeSandboxConfig(data []byte) (*cri.PodSandboxConfig, error) {
	var c cri.PodSandboxConfig
	if err := proto.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("decode sandbox config: %w", err)
	}
	return &c, nil
}

func decodeContainerConfig(data []byte) (*cri.ContainerConfig, error) {
	var c cri.ContainerConfig
	if err := proto.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("decode container config: %w", err)
	}
	return &c, nil
}

// parseExitRecord parses the shim's exit record of a container: "code finished started [oom]".
// Later releases may append fields.
func parseExitRecord(data []byte) (exitRecord, error) {
	line, _, _ := strings.Cut(string(data), "\n")
	f := strings.Fields(line)
	if len(f) < 3 {
		return exitRecord{}, fmt.Errorf("exit record %q is malformed", data)
	}
	code, err := strconv.ParseInt(f[0], 10, 32)
	if err != nil {
		return exitRecord{}, fmt.Errorf("exit record %q: %w", data, err)
	}
	e := exitRecord{Code: int32(code), OOM: slices.Contains(f[3:], "oom")}
	for i, p := range []*int64{&e.Finished, &e.Started} {
		if *p, err = strconv.ParseInt(f[1+i], 10, 64); err != nil {
			return exitRecord{}, fmt.Errorf("exit record %q: %w", data, err)
		}
	}
	return e, nil
}
