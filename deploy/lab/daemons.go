package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

func (l *Lab) binPath(name string) string { return filepath.Join(l.Config.BinDir, name) }

// programPath returns the path of a program for the host h: in Host.BinDir if set, otherwise in
// Config.BinDir.
func (l *Lab) programPath(h Host, name string) string {
	return filepath.Join(cmp.Or(h.BinDir, l.Config.BinDir), name)
}

// daemonArgs returns the program and the arguments of the host's daemon: a replica, an agent, or
// the registry.
func (l *Lab) daemonArgs(h Host) []string {
	ip := h.IP.String()
	switch h.Role {
	case RoleControlPlane:
		args := []string{l.programPath(h, "keelson-controlplane"), "run",
			"--name=" + h.Name, "--data-dir=/var/lib/keelson/controlplane", "--advertise-address=" + ip,
			"--eviction-seconds=" + strconv.Itoa(l.Config.EvictionSeconds),
			"--memory-limit=" + strconv.Itoa(ReplicaMemory),
		}
		return append(args, l.Config.ControlPlaneFlags...)
	case RoleWorker:
		args := []string{l.programPath(h, "keelson-agent"),
			"--node-name=" + h.Name, "--node-ip=" + h.nodeIPs(),
			"--token-file=/etc/keelson/token",
			"--cgroup-root=" + h.CgroupPath(),
			"--capacity=cpu=" + l.Config.CPU + ",memory=" + l.Config.Memory,
			"--archives-dir=/var/lib/keelson/images.d",
			"--insecure-registry=" + l.registryAddress(), "--registry-mirror=*=" + l.registryAddress(),
		}
		for _, cp := range l.hostsWithRole(RoleControlPlane) {
			args = append(args, "--server="+cp.Endpoint(FleetPort))
		}
		if l.Config.PodNetwork != "" {
			args = append(args, "--pod-network="+l.Config.PodNetwork)
		}
		return args
	default:
		return []string{l.binPath("kctl"), "lab", "serve-registry", "--listen=" + l.registryAddress(),
			"--folder=/var/lib/keelson/registry"}
	}
}

func (l *Lab) registryAddress() string {
	h, _ := l.Host("registry")
	return h.Endpoint(RegistryPort)
}

// adminKubeconfig is the path, below the state folder of the first replica's host, at which 'init'
// writes the administrator's kubeconfig.
const adminKubeconfig = "lib/controlplane/admin.kubeconfig"

// initResult is the JSON output of 'keelson-controlplane init'.
type initResult struct {
	NodeToken         string `json:"nodeToken"`
	ControlPlaneToken string `json:"controlPlaneToken"`
	Kubeconfig        string `json:"kubeconfig"` // path on the host
}

// initCluster runs 'keelson-controlplane init' on the host of the first replica, which creates the
// CAs and keys of the cluster. It returns the output and the administrator's kubeconfig.
func (l *Lab) initCluster(ctx context.Context) (initResult, []byte, error) {
	first := l.hostsWithRole(RoleControlPlane)[0]
	pods, services := l.Config.Ranges()
	cmd := first.Command(ctx, l.programPath(first, "keelson-controlplane"), "init",
		"--name="+first.Name, "--data-dir=/var/lib/keelson/controlplane", "--advertise-address="+first.IP.String(),
		"--cluster-name="+strings.ReplaceAll(root, "@", "-"), "--cluster-cidr="+pods, "--service-cidr="+services,
		"--kubeconfig-server=https://"+l.Config.Listen, "--output=json",
		"--node-token-uses="+strconv.Itoa(max(1, len(l.hostsWithRole(RoleWorker)))),
		"--replica-token-uses="+strconv.Itoa(max(1, len(l.hostsWithRole(RoleControlPlane))-1)))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return initResult{}, nil, fmt.Errorf("initialising the cluster on %s: %w", first.Name, err)
	}
	var r initResult
	if err := json.Unmarshal(out, &r); err != nil {
		return r, nil, fmt.Errorf("initialising the cluster on %s: unexpected output %q: %w", first.Name, out, err)
	}
	kubeconfig, err := os.ReadFile(filepath.Join(first.stateDir(), adminKubeconfig))
	return r, kubeconfig, err
}

// joinReplica runs 'keelson-controlplane join' on the host h with a join token. The new replica
// gets the CAs and keys of the cluster from the first replica.
func (l *Lab) joinReplica(ctx context.Context, h Host, token string) error {
	first := l.hostsWithRole(RoleControlPlane)[0]
	args := []string{l.programPath(h, "keelson-controlplane"), "join",
		"--name=" + h.Name, "--data-dir=/var/lib/keelson/controlplane", "--advertise-address=" + h.IP.String(),
		"--token=" + token, "--server=" + first.Endpoint(FleetPort)}
	if h.Standby {
		args = append(args, "--standby")
	}
	cmd := h.Command(ctx, args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("joining replica %s: %w: %s", h.Name, err, out)
	}
	return nil
}

// writeJoinToken writes a join token to the host's file /etc/keelson/token, which its agent reads.
func (h Host) writeJoinToken(token string) error {
	return os.WriteFile(filepath.Join(h.stateDir(), "etc", "token"), []byte(token), 0o600)
}

// copyImages copies the archives in Config.ImageDir to the folder from which the agent of the host
// h imports images.
func (l *Lab) copyImages(h Host) error {
	archives, err := l.archives()
	if err != nil || len(archives) == 0 {
		return err
	}
	dir := filepath.Join(h.stateDir(), "lib", "images.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, a := range archives {
		raw, err := os.ReadFile(a)
		if err != nil {
			return fmt.Errorf("image archive for host %s: %w", h.Name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(a)), raw, 0o644); err != nil {
			return fmt.Errorf("image archive for host %s: %w", h.Name, err)
		}
	}
	return nil
}
