package podfiles

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Log shippers read /var/log/containers, in which a kubelet keeps one symbolic link per container
// log. The link's name contains the pod, the namespace, the container and its ID. A link is created
// when its container starts and removed with the container. Links to missing logs are removed when
// the agent starts.

// maxFileName is the longest file name, in bytes.
const maxFileName = 255

// logLinkPath returns the path of the link to a container's log. A name that is too long is
// truncated before the ID, as in the kubelet.
func logLinkPath(dir string, pod *v1.Pod, container, id string) string {
	suffix := "-" + id + ".log"
	name := pod.Name + "_" + pod.Namespace + "_" + container
	if maxLength := maxFileName - len(suffix); len(name) > maxLength {
		name = name[:max(maxLength, 0)]
	}
	return filepath.Join(dir, name+suffix)
}

// WriteLogLink creates the link to a container's log. It replaces an existing link of that name.
func WriteLogLink(paths agent.Paths, pod *v1.Pod, container, id string, attempt uint32) error {
	if paths.LogLinks == "" || pod.Name == "" {
		return nil
	}
	if err := os.MkdirAll(paths.LogLinks, 0o755); err != nil {
		return err
	}
	link := logLinkPath(paths.LogLinks, pod, container, id)
	target := filepath.Join(LogDirectory(paths.Logs, pod), ContainerLogPath(container, attempt))
	if current, err := os.Readlink(link); err == nil && current == target {
		return nil
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Symlink(target, link)
}

// RemoveLogLink removes the link to a container's log.
func RemoveLogLink(paths agent.Paths, pod *v1.Pod, container, id string) error {
	if paths.LogLinks == "" || pod.Name == "" {
		return nil
	}
	if err := os.Remove(logLinkPath(paths.LogLinks, pod, container, id)); err != nil &&
		!errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// RemoveLogLinks removes the links to all logs of a pod.
func RemoveLogLinks(paths agent.Paths, pod *v1.Pod) error {
	within := LogDirectory(paths.Logs, pod) + string(filepath.Separator)
	return sweepLogLinks(paths, func(target string) bool { return strings.HasPrefix(target, within) })
}

// removeDeadLogLinks removes the dangling links to targets in this agent's log directory.
func removeDeadLogLinks(paths agent.Paths) error {
	within := paths.Logs + string(filepath.Separator)
	return sweepLogLinks(paths, func(target string) bool {
		if !strings.HasPrefix(target, within) {
			return false // created by another agent or by an administrator
		}
		_, err := os.Stat(target)
		return errors.Is(err, os.ErrNotExist)
	})
}

// sweepLogLinks removes a link in the directory of log links if the function remove returns true
// for the target of the link.
func sweepLogLinks(paths agent.Paths, remove func(target string) bool) error {
	if paths.LogLinks == "" {
		return nil
	}
	entries, err := os.ReadDir(paths.LogLinks)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if e.Type()&os.ModeSymlink == 0 {
			continue
		}
		link := filepath.Join(paths.LogLinks, e.Name())
		target, err := os.Readlink(link)
		if err != nil || !remove(target) {
			continue
		}
		if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// RestoreLogLinks creates the links of existing containers and removes dead links. After an
// upgrade, containers of an older agent may have no links.
func RestoreLogLinks(paths agent.Paths, containers []*cri.Container) error {
	if paths.LogLinks == "" {
		return nil
	}
	if err := removeDeadLogLinks(paths); err != nil {
		return fmt.Errorf("remove dangling links in %s: %w", paths.LogLinks, err)
	}
	for _, c := range containers {
		pod := &v1.Pod{}
		pod.Name, pod.Namespace = c.Labels[agent.LabelPodName], c.Labels[agent.LabelPodNamespace]
		pod.UID = types.UID(c.Labels[agent.LabelPodUID])
		log := filepath.Join(LogDirectory(paths.Logs, pod),
			ContainerLogPath(c.GetMetadata().GetName(), c.GetMetadata().GetAttempt()))
		if _, err := os.Stat(log); err != nil {
			continue
		}
		if err := WriteLogLink(paths, pod, c.GetMetadata().GetName(), c.Id, c.GetMetadata().GetAttempt()); err != nil {
			return fmt.Errorf("link the log of container %s: %w", c.Id, err)
		}
	}
	return nil
}
