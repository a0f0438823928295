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

func (hb hostBuilder) binPath(name string) string { return filepath.Join(hb.config.BinDir, name) }

// programPath returns the path of a program for the host h: in Host.BinDir if set, otherwise in
// Config.BinDir.
func (hb hostBuilder) programPath(h Host, name string) string {
	return filepath.Join(cmp.Or(h.BinDir, hb.config.BinDir), name)
}

// daemonArgs returns the program and the arguments of the host's daemon: a replica, an agent, or
// the registry.
func (hb hostBuilder) daemonArgs(h Host) []string {
	ip := h.IP.String()
	switch h.Role {
	case RoleControlPlane:
		args := []string{hb.programPath(h, "keelson-controlplane"), "run",
			"--name=" + h.Name, "--data-dir=/var/lib/keelson/controlplane", "--advertise-address=" + ip,
			"--eviction-seconds=" + strconv.Itoa(hb.config.EvictionSeconds),
			"--memory-limit=" + strconv.Itoa(ReplicaMemory),
		}
		return append(args, hb.config.ControlPlaneFlags...)
	case RoleWorker:
		args := []string{hb.programPath(h, "keelson-agent"),
			"--node-name=" + h.Name, "--node-ip=" + h.nodeIPs(),
			"--token-file=/etc/keelson/token",
			"--cgroup-root=" + h.CgroupPath(),
			"--capacity=cpu=" + hb.config.CPU + ",memory=" + hb.config.Memory,
			"--archives-dir=/var/lib/keelson/images.d",
			"--insecure-registry=" + hb.registryAddress(), "--registry-mirror=*=" + hb.registryAddress(),
		}
		for _, cp := range hb.hostsWithRole(RoleControlPlane) {
			args = append(args, "--server="+cp.Endpoint(FleetPort))
		}
		if hb.config.PodNetwork != "" {
			args = append(args, "--pod-network="+hb.config.PodNetwork)
		}
		return args
	default:
		return []string{hb.binPath("kctl"), "lab", "serve-registry", "--listen=" + hb.registryAddress(),
			"--folder=/var/lib/keelson/registry"}
	}
}

func (hb hostBuilder) registryAddress() string {
	h, _ := findHost(hb.config.Hosts, "registry")
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
func (hb hostBuilder) initCluster(ctx context.Context) (initResult, []byte, error) {
	first := hb.hostsWithRole(RoleControlPlane)[0]
	pods, services := hb.config.Ranges()
	cmd := first.Command(ctx, hb.programPath(first, "keelson-controlplane"), "init",
		"--name="+first.Name, "--data-dir=/var/lib/keelson/controlplane", "--advertise-address="+first.IP.String(),
		"--cluster-name="+strings.ReplaceAll(root, "@", "-"), "--cluster-cidr="+pods, "--service-cidr="+services,
		"--kubeconfig-server=https://"+hb.config.Listen, "--output=json",
		"--node-token-uses="+strconv.Itoa(max(1, len(hb.hostsWithRole(RoleWorker)))),
		"--replica-token-uses="+strconv.Itoa(max(1, len(hb.hostsWithRole(RoleControlPlane))-1)))
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
func (hb hostBuilder) joinReplica(ctx context.Context, h Host, token string) error {
	first := hb.hostsWithRole(RoleControlPlane)[0]
	args := []string{hb.programPath(h, "keelson-controlplane"), "join",
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

// writeJoinToken writes a join token to the file /etc/keelson/token of the host h, which the agent
// on h reads.
func (h Host) writeJoinToken(token string) error {
	return os.WriteFile(filepath.Join(h.stateDir(), "etc", "token"), []byte(token), 0o600)
}

// copyImages copies the archives in Config.ImageDir to the folder from which the agent of the host
// h imports images.
func (r registryLoader) copyImages(h Host) error {
	archives, err := r.lab.hosts().archives()
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
