package oci

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
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

// recordVersion is the version in new records. Fields may be added but never change their meaning.
// Readers skip unknown fields and treat missing fields as zero, so a release can read the records
// of other releases.
const recordVersion = 1

// sandboxRecord is the record of a sandbox on disk. It is written before anything is created, and
// again when its state changes.
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
	Boot     string       `json:"boot"` // boot ID of the machine while its processes ran
}

// containerRecord is the record of a container on disk. The shim stores how it ended in a separate
// file.
type containerRecord struct {
	Version  int            `json:"version"`
	ID       string         `json:"id"`
	Sandbox  string         `json:"sandbox"`
	State    ContainerState `json:"state"` // creating, created or running, never exited: the shim's file has the end
	Config   []byte         `json:"config"`
	Created  int64          `json:"created"`
	Started  int64          `json:"started,omitempty"`
	ImageID  string         `json:"imageID"`
	ImageRef string         `json:"imageRef"`
	Cgroup   string         `json:"cgroup"`
	Log      string         `json:"log,omitempty"`
	Stop     int            `json:"stop"`              // stop signal
	SharePID bool           `json:"sharePID"`          // its child processes survive its first process
	Process  *specs.Process `json:"process,omitempty"` // template for exec
	User     bundle.Answer  `json:"user"`

	// StartError is why the container cannot be started; empty if it can. A release without this
	// field finds no process and marks the container as ended.
	StartError string `json:"startError,omitempty"`
}

// unend replaces the state exited by running: a reader would trust it without knowing the exit
// code. Records of earlier releases contain exited for a container that ended before its start was
// recorded.
func (rec *containerRecord) unend() {
	if rec.State == ContainerExited {
		rec.State = ContainerRunning
	}
}

// exitRecord is how a container ended.
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

// saveJSON writes a record atomically. It does not sync it, because the processes in the record do
// not survive a power failure either.
func saveJSON(path string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := durable.Replace(path, data); err != nil {
		return fmt.Errorf("save %s: %w", path, err)
	}
	return nil
}

func (r *Runtime) saveSandbox(rec *sandboxRecord) error {
	rec.Version = recordVersion
	return saveJSON(filepath.Join(r.sandboxDir(rec.ID), "sandbox.json"), rec)
}

func (r *Runtime) saveContainer(rec *containerRecord) error {
	rec.Version = recordVersion
	rec.unend()
	return saveJSON(filepath.Join(r.containerDir(rec.ID), "container.json"), rec)
}

func decodeSandboxConfig(b []byte) (*cri.PodSandboxConfig, error) {
	var c cri.PodSandboxConfig
	if err := proto.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("decode sandbox config: %w", err)
	}
	return &c, nil
}

func decodeContainerConfig(b []byte) (*cri.ContainerConfig, error) {
	var c cri.ContainerConfig
	if err := proto.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("decode container config: %w", err)
	}
	return &c, nil
}

// parseExit parses the shim's record of an end: "code finished started [oom]". Later releases may
// append fields.
func parseExit(b []byte) (exitRecord, error) {
	line, _, _ := strings.Cut(string(b), "\n")
	f := strings.Fields(line)
	if len(f) < 3 {
		return exitRecord{}, fmt.Errorf("exit record %q is malformed", b)
	}
	code, err := strconv.ParseInt(f[0], 10, 32)
	if err != nil {
		return exitRecord{}, fmt.Errorf("exit record %q: %w", b, err)
	}
	e := exitRecord{Code: int32(code), OOM: slices.Contains(f[3:], "oom")}
	for i, p := range []*int64{&e.Finished, &e.Started} {
		if *p, err = strconv.ParseInt(f[1+i], 10, 64); err != nil {
			return exitRecord{}, fmt.Errorf("exit record %q: %w", b, err)
		}
	}
	return e, nil
}

// bootID returns the ID of the current boot of the machine; "" if unknown.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
