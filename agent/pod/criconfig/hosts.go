package criconfig

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/filewatch"
	"keelson.dev/keelson/internal/safepath"
)

func (b *Builder) subPathTarget(pod *v1.Pod, container string, index int) string {
	return filepath.Join(podfiles.PodDirectory(b.cfg.Paths, pod.UID), podfiles.SubPathsDir, container,
		strconv.Itoa(index))
}

// hostnameAndDomain returns the pod's hostname and its DNS domain, which is empty if the pod has no
// spec.subdomain. cluster is the cluster domain.
func hostnameAndDomain(pod *v1.Pod, cluster string) (name, domain string) {
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

// containerHostname returns the host name of the pod's containers: an FQDN if setHostnameAsFQDN is
// set.
func containerHostname(pod *v1.Pod, cluster string) (string, error) {
	name, domain := hostnameAndDomain(pod, cluster)
	if pod.Spec.SetHostnameAsFQDN != nil && *pod.Spec.SetHostnameAsFQDN && domain != "" {
		fqdn := name + "." + domain
		if len(fqdn) > 64 {
			return "", fmt.Errorf(
				"failed to construct FQDN from pod hostname and cluster domain, FQDN %s is too long (64 characters is "+
					"the max, %d characters requested)",
				fqdn, len(fqdn))
		}
		return fqdn, nil
	}
	return name, nil
}

// maxNodeHosts is the maximum number of bytes read of the node's hosts file. Pods in the host's
// network get a copy of this file.
const maxNodeHosts = 1 << 20

// WriteHostsFile writes the pod's /etc/hosts and returns its path.
func (b *Builder) WriteHostsFile(pod *v1.Pod) (string, error) {
	// Containers start concurrently: none may see a partly written file.
	b.hostsMu.Lock()
	defer b.hostsMu.Unlock()
	file := filepath.Join(podfiles.PodDirectory(b.cfg.Paths, pod.UID), "etc-hosts")
	var text string
	if pod.Spec.HostNetwork {
		nodeHosts, err := filewatch.Read("/etc/hosts", maxNodeHosts)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("reading the node's hosts file for pod %s/%s: %w", pod.Namespace, pod.Name, err)
		}
		text = "# Kubernetes-managed hosts file (host network).\n" + string(nodeHosts) + hostAliasEntries(pod)
	} else {
		text = hostsFileContent(pod, b.cfg.Objects.Cluster().Domain)
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

func hostsFileContent(pod *v1.Pod, cluster string) string {
	var b strings.Builder
	b.WriteString(
		"# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n" +
			"fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n")
	name, domain := hostnameAndDomain(pod, cluster)
	for _, ip := range pod.Status.PodIPs {
		if domain != "" {
			fmt.Fprintf(&b, "%s\t%s.%s\t%s\n", ip.IP, name, domain, name)
		} else {
			fmt.Fprintf(&b, "%s\t%s\n", ip.IP, name)
		}
	}
	return b.String() + hostAliasEntries(pod)
}

func hostAliasEntries(pod *v1.Pod) string {
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
