package pod

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/filewatch"
	"keelson.dev/keelson/internal/safepath"
)

// directory returns the worker's directory for a pod: hosts file, termination messages, subPath
// mounts.
func directory(p agent.Paths, uid types.UID) string {
	return filepath.Join(p.State, "pods", string(uid))
}

func (w *worker) subPathTarget(pod *v1.Pod, container string, index int) string {
	return filepath.Join(directory(w.cfg.Paths, pod.UID), subPaths, container, strconv.Itoa(index))
}

// subPaths is the subdirectory of a pod's directory that contains its subPath mounts. Nothing is
// mounted elsewhere in the pod's directory.
const subPaths = "subpaths"

// noSubPaths reports whether the pod has no subPath mounts. It avoids reading the long mount table
// of a full node.
func noSubPaths(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, subPaths))
	return errors.Is(err, fs.ErrNotExist)
}

// terminationPath returns the file to which an instance of a container may write its termination
// message.
func terminationPath(p agent.Paths, uid types.UID, container string, attempt uint32) string {
	return filepath.Join(directory(p, uid), "termination-"+container+"-"+strconv.FormatUint(uint64(attempt), 10))
}

// ownName returns the pod's hostname and its DNS domain. The domain is empty without
// spec.subdomain.
func ownName(pod *v1.Pod, cluster string) (name, domain string) {
	if n := pod.Spec.HostnameOverride; n != nil && *n != "" {
		return *n, ""
	}
	name = pod.Name
	if pod.Spec.Hostname != "" {
		name = pod.Spec.Hostname
	}
	if len(name) > 63 {
		name = strings.TrimRight(name[:63], "-.")
	}
	if pod.Spec.Subdomain != "" {
		domain = pod.Spec.Subdomain + "." + pod.Namespace + ".svc." + cluster
	}
	return name, domain
}

// hostname returns the host name of the pod's containers: an FQDN if setHostnameAsFQDN is set.
func hostname(pod *v1.Pod, cluster string) (string, error) {
	name, domain := ownName(pod, cluster)
	if pod.Spec.SetHostnameAsFQDN != nil && *pod.Spec.SetHostnameAsFQDN && domain != "" {
		fqdn := name + "." + domain
		if len(fqdn) > 64 {
			return "", fmt.Errorf("failed to construct FQDN from pod hostname and cluster domain, FQDN %s is too long (64 characters is the max, %d characters requested)", fqdn, len(fqdn))
		}
		return fqdn, nil
	}
	return name, nil
}

// maxNodeHosts bounds the node's hosts file, which pods in the host's network get a copy of.
const maxNodeHosts = 1 << 20

// hostsFile writes the pod's /etc/hosts and returns its path.
func (w *worker) hostsFile(pod *v1.Pod) (string, error) {
	// Containers start concurrently: none may see a partly written file.
	w.hosts.Lock()
	defer w.hosts.Unlock()
	file := filepath.Join(directory(w.cfg.Paths, pod.UID), "etc-hosts")
	var text string
	if pod.Spec.HostNetwork {
		b, err := filewatch.Read("/etc/hosts", maxNodeHosts)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("reading the node's hosts file for pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
		text = "# Kubernetes-managed hosts file (host network).\n" + string(b) + hostAliases(pod)
	} else {
		text = hostsText(pod, w.cfg.Objects.Cluster().Domain)
	}
	// Containers can write to the hosts file. A file longer than text differs from it and is not
	// read.
	if old, err := safepath.ReadFile(file, int64(len(text))); err == nil && string(old) == text {
		return file, nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		return "", fmt.Errorf("writing the hosts file of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	// Overwrite in place: the file is bind-mounted into containers that may be running.
	if err := safepath.Overwrite(file, []byte(text), 0o644); err != nil {
		return "", fmt.Errorf("writing the hosts file of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return file, nil
}

func hostsText(pod *v1.Pod, cluster string) string {
	var b strings.Builder
	b.WriteString("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n" +
		"fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n")
	name, domain := ownName(pod, cluster)
	for _, ip := range pod.Status.PodIPs {
		if domain != "" {
			fmt.Fprintf(&b, "%s\t%s.%s\t%s\n", ip.IP, name, domain, name)
		} else {
			fmt.Fprintf(&b, "%s\t%s\n", ip.IP, name)
		}
	}
	return b.String() + hostAliases(pod)
}

func hostAliases(pod *v1.Pod) string {
	if len(pod.Spec.HostAliases) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("\n# Entries added by HostAliases.\n")
	for _, a := range pod.Spec.HostAliases {
		fmt.Fprintf(&b, "%s\t%s\n", a.IP, strings.Join(a.Hostnames, "\t"))
	}
	return b.String()
}

// terminationFile creates the termination message file of a container and adds its mount to c.
func (w *worker) terminationFile(pod *v1.Pod, spec *v1.Container, attempt uint32, c *cri.ContainerConfig) error {
	if spec.TerminationMessagePath == "" {
		return nil
	}
	file := terminationPath(w.cfg.Paths, pod.UID, spec.Name, attempt)
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		return fmt.Errorf("making the termination message file of container %q: %w", spec.Name, err)
	}
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		return fmt.Errorf("making the termination message file of container %q: %w", spec.Name, err)
	}
	// The container may run as any user, so the mode must not depend on this process's umask.
	if err := os.Chmod(file, 0o666); err != nil {
		return fmt.Errorf("making the termination message file of container %q: %w", spec.Name, err)
	}
	c.Annotations[annTermFile] = file
	c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: spec.TerminationMessagePath, HostPath: file})
	return nil
}

// The documented limits of termination messages: of one container, of all containers of a pod, and
// of the log fallback.
const (
	maxMessage      = 4096
	maxMessages     = 12 << 10
	maxMessageLog   = 2048
	maxMessageLines = 80
)

// terminationMessage returns the termination message of an ended container. With policy
// FallbackToLogsOnError, the message of a failed container may come from its log.
func (w *worker) terminationMessage(st *cri.ContainerStatus) string {
	msg := ""
	if f := st.Annotations[annTermFile]; f != "" {
		msg = head(f, maxMessage)
	}
	if msg == "" && st.ExitCode != 0 && st.Annotations[annTermPolicy] == string(v1.TerminationMessageFallbackToLogsOnError) {
		file := st.LogPath
		if !filepath.IsAbs(file) {
			file = filepath.Join(logDirectory(w.cfg.Paths.Logs, w.pod()), file)
		}
		msg = logTail(file)
	}
	if msg == "" {
		msg = st.Message
	}
	return msg
}

// shareOfMessages returns the maximum size of one container's termination message in the pod's
// status.
func shareOfMessages(pod *v1.Pod) int {
	return maxMessages / max(1, len(pod.Spec.InitContainers)+len(pod.Spec.Containers))
}

func head(file string, limit int64) string {
	f, err := safepath.OpenRegular(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit))
	if err != nil {
		return ""
	}
	return string(b)
}

// logTail returns the text of the last lines of a CRI log file.
func logTail(file string) string {
	f, err := safepath.OpenRegular(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	// Each line has a prefix of about 40 bytes, and its longest part has 16 KiB: read enough for
	// all limits.
	from := max(0, st.Size()-maxMessageLog-maxMessageLines*64-17<<10)
	b, err := io.ReadAll(io.NewSectionReader(f, from, st.Size()-from))
	if err != nil {
		return ""
	}
	lines := strings.SplitAfter(string(b), "\n")
	if from > 0 && len(lines) > 0 {
		lines = lines[1:]
	}
	lines = lines[max(0, len(lines)-maxMessageLines-1):]
	var out strings.Builder
	for _, l := range lines {
		part := strings.SplitN(l, " ", 4) // time, stream, tag, text
		if len(part) < 4 {
			continue
		}
		if part[2] == "P" {
			part[3] = strings.TrimSuffix(part[3], "\n")
		}
		out.WriteString(part[3])
	}
	s := out.String()
	return s[max(0, len(s)-maxMessageLog):]
}
