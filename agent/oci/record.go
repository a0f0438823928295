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

// recordVersion is written into records. Fields are added under new names and never change their meaning; who reads
// skips those it does not know, and those that are missing are zero. So a release reads the records of others.
const recordVersion = 1

// sandboxRecord is what is known of a sandbox on disk. It is written before
// anything is made and again when its state changes.
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
	Boot     string       `json:"boot"` // boot in which its processes ran
}

// containerRecord is the same of a container. How it ended is in a file of its
// own, which the shim writes.
type containerRecord struct {
	Version  int            `json:"version"`
	ID       string         `json:"id"`
	Sandbox  string         `json:"sandbox"`
	State    ContainerState `json:"state"` // creating, created or running; how it ended is the shim's to say
	Config   []byte         `json:"config"`
	Created  int64          `json:"created"`
	Started  int64          `json:"started,omitempty"`
	ImageID  string         `json:"imageID"`
	ImageRef string         `json:"imageRef"`
	Cgroup   string         `json:"cgroup"`
	Log      string         `json:"log,omitempty"`
	Stop     int            `json:"stop"`              // signal
	SharePID bool           `json:"sharePID"`          // its end leaves its children alive
	Process  *specs.Process `json:"process,omitempty"` // template for exec
	User     bundle.Answer  `json:"user"`

	// StartError is why the container cannot be started, empty if it can. A release without this field finds no
	// process of the container and ends it.
	StartError string `json:"startError,omitempty"`
}

// unend takes back that the container has ended: whoever reads that would believe it without knowing how. Records of
// earlier releases say so of a container that ended before its start was noted.
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

// newID returns 256 random bits as 64 hexadecimal digits: log shippers expect that many in the names of log files.
func newID() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// saveJSON writes a record. It is not synced: processes that a record speaks of do not outlive a power cut either.
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

// parseExit reads the shim's record: "code finished started [oom]". What a later release adds comes after that.
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

// bootID tells this boot from others.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
