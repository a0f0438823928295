package oci

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// openTarget opens the PID namespace of the container whose processes the new container of sandbox
// s shares (NamespaceMode_TARGET). It returns nil if the configuration has no target. It returns an
// error if the target is not a running container of the same sandbox. The caller closes the file.
//
// The namespace is that of the target's first process. Any other process in the target's cgroup may
// be in another namespace: the first stage of an exec is still in the namespace of the host.
func (r *Runtime) openTarget(s *sandbox, config *cri.ContainerConfig) (*os.File, error) {
	options := config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if options.GetPid() != cri.NamespaceMode_TARGET {
		return nil, nil
	}
	target, err := r.findContainer(options.GetTargetId())
	if err != nil {
		return nil, err
	}
	if target.rec.Sandbox != s.rec.ID {
		return nil, status.Errorf(codes.InvalidArgument, "target container %s belongs to another sandbox",
			target.rec.ID)
	}
	notRunning := status.Errorf(codes.FailedPrecondition, "target container %s is not running", target.rec.ID)
	if target.containerState() != ContainerRunning {
		return nil, notRunning
	}
	first, err := r.paths.readFirstProcess(target.rec.ID)
	if err != nil {
		return nil, fmt.Errorf("find the first process of target container %s: %w", target.rec.ID, err)
	}
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", first.PID))
	if err != nil {
		return nil, notRunning
	}
	// If the process still exists now, the file is its namespace and not that of a later process
	// with the same ID.
	if started, err := readStartTime(first.PID); err != nil || started != first.StartTime {
		namespace.Close()
		return nil, notRunning
	}
	return namespace, nil
}

// firstProcess is the part of libcontainer's state file about the first process of a container.
// StartTime is in clock ticks since the boot of the machine.
type firstProcess struct {
	PID       int    `json:"init_process_pid"`
	StartTime uint64 `json:"init_process_start"`
}

// readFirstProcess reads the first process of a created container from libcontainer's state file.
func (l layout) readFirstProcess(id string) (first firstProcess, err error) {
	data, err := os.ReadFile(filepath.Join(l.libcontainerDir(), id, "state.json"))
	if err != nil {
		return first, err
	}
	err = json.Unmarshal(data, &first)
	return first, err
}

// readStartTime returns when a process was started, in clock ticks since the boot of the machine.
func readStartTime(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	const startTime = 22 - 3 // the third field follows the command, which may contain spaces
	text := string(data)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) <= startTime {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields after the command", pid, len(fields))
	}
	return strconv.ParseUint(fields[startTime], 10, 64)
}
