// Package podfiles reads and writes the files that the agent keeps about pods on the node. These
// are the pods' directories and logs, the links to the logs, and the records of grants, evictions
// and the confirmed assignment.
package podfiles

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// LogDirectory returns a pod's log directory, in the layout that log collectors expect:
// NAMESPACE_NAME_UID.
func LogDirectory(root string, pod *v1.Pod) string {
	return filepath.Join(root, pod.Namespace+"_"+pod.Name+"_"+string(pod.UID))
}

// FillNamesFromLogs sets the namespace and the name of those pods of which only the UID is known.
// It reads them from the names of the log directories. It keeps the log directory of an unknown
// UID, which may belong to a kubelet on this machine.
func FillNamesFromLogs(root string, pods map[types.UID]*v1.Pod) error {
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		parts := strings.Split(e.Name(), "_") // none of the three parts can contain an underscore
		if !e.IsDir() || len(parts) != 3 || parts[0] == "" || parts[1] == "" {
			continue
		}
		if p := pods[types.UID(parts[2])]; p != nil && p.Name == "" {
			p.Namespace, p.Name = parts[0], parts[1]
		}
	}
	return nil
}

// ContainerLogPath returns the path of a container's log relative to the pod's log directory.
func ContainerLogPath(name string, attempt uint32) string {
	return filepath.Join(name, strconv.FormatUint(uint64(attempt), 10)+".log")
}

// PodDirectory returns the worker's directory for a pod: hosts file, termination messages, subPath
// mounts.
func PodDirectory(paths agent.Paths, uid types.UID) string {
	return filepath.Join(paths.State, "pods", string(uid))
}

// SubPathsDir is the subdirectory of a pod's directory that contains its subPath mounts. Nothing is
// mounted elsewhere in the pod's directory.
const SubPathsDir = "subpaths"

// HasNoSubPaths reports whether the pod with the directory dir has no subPath mounts. Callers use
// it to avoid reading the long mount table of a full node.
func HasNoSubPaths(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, SubPathsDir))
	return errors.Is(err, fs.ErrNotExist)
}

// TerminationMessagePath returns the file to which an instance of a container may write its
// termination message.
func TerminationMessagePath(paths agent.Paths, uid types.UID, container string, attempt uint32) string {
	return filepath.Join(PodDirectory(paths, uid), "termination-"+container+"-"+strconv.FormatUint(uint64(attempt), 10))
}
