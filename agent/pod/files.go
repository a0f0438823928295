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

// directory holds the worker's own files of a pod: hosts, termination messages, subPath mounts.
func directory(p agent.Paths, uid types.UID) string {
	return filepath.Join(p.State, "pods", string(uid))
}

func (w *worker) subPathTarget(pod *v1.Pod, container string, index int) string {
	return filepath.Join(directory(w.cfg.Paths, pod.UID), subPaths, container, strconv.Itoa(index))
}

// subPaths is the folder of a pod's subPath mounts; nothing else is ever mounted below its directory.
const subPaths = "subpaths"

// noSubPaths says that a pod has none. Most have none, and the table of all mounts of a full node is long.
func noSubPaths(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, subPaths))
	return errors.Is(err, fs.ErrNotExist)
}

// terminationPath is the file that an instance of a container may write its last words into.
func terminationPath(p agent.Paths, uid types.UID, container string, attempt uint32) string {
	return filepath.Join(directory(p, uid), "termination-"+container+"-"+strconv.FormatUint(uint64(attempt), 10))
}

// ownName is the pod's name as it sees it itself, and the domain that it is in, if any.
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

// hostname is what the pod's containers have as the name of their host.
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

// maxNodeHosts bounds the node's own hosts file, which pods of the host's network get a copy of.
const maxNodeHosts = 1 << 20

// hostsFile writes the pod's /etc/hosts and returns its path.
func (w *worker) hostsFile(pod *v1.Pod) (string, error) {
	// Containers start side by side: none may see the file half written by another's start.
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
	// Containers can write to the file: a larger one is not the wanted text, and is not read.
	if old, err := safepath.ReadFile(file, int64(len(text))); err == nil && string(old) == text {
		return file, nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		return "", fmt.Errorf("writing the hosts file of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	// In place: the file is bind-mounted into containers that may be running.
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

// terminationFile makes the file into which the container may write its last words and mounts it.
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
	// The container may run as any user: the mask of this process must not decide who may write.
	if err := os.Chmod(file, 0o666); err != nil {
		return fmt.Errorf("making the termination message file of container %q: %w", spec.Name, err)
	}
	c.Annotations[annTermFile] = file
	c.Mounts = append(c.Mounts, &cri.Mount{ContainerPath: spec.TerminationMessagePath, HostPath: file})
	return nil
}

// The limits of a termination message, as documented: one container's, and those of a pod's containers together.
const (
	maxMessage      = 4096
	maxMessages     = 12 << 10
	maxMessageLog   = 2048
	maxMessageLines = 80
)

// terminationMessage reads an ended container's last words; with policy
// FallbackToLogsOnError those of a failed one may come from its log.
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

// shareOfMessages is what one container's last words may take of its pod's status.
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

// logTail is the text of the last lines of a CRI log.
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
	// Every line carries about 40 bytes of stamp, and the longest part of one has 16 KiB: read enough for all limits.
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
