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

func (l *Lab) bin(name string) string { return filepath.Join(l.Config.BinDir, name) }

// program is a program that the host runs: of its own folder, or of the lab's.
func (l *Lab) program(h Host, name string) string {
	return filepath.Join(cmp.Or(h.BinDir, l.Config.BinDir), name)
}

// daemon is the command line of the host's daemon, as a unit file would have it.
func (l *Lab) daemon(h Host) []string {
	ip := h.IP.String()
	switch h.Role {
	case RoleControlPlane:
		args := []string{l.program(h, "keelson-controlplane"), "run",
			"--name=" + h.Name, "--data-dir=/var/lib/keelson/controlplane", "--advertise-address=" + ip,
			"--eviction-seconds=" + strconv.Itoa(l.Config.EvictionSeconds),
			"--memory-limit=" + strconv.Itoa(ReplicaMemory),
		}
		return append(args, l.Config.ControlPlaneFlags...)
	case RoleWorker:
		args := []string{l.program(h, "keelson-agent"),
			"--node-name=" + h.Name, "--node-ip=" + h.nodeIPs(),
			"--token-file=/etc/keelson/token",
			"--cgroup-root=" + h.CgroupPath(),
			"--capacity=cpu=" + l.Config.CPU + ",memory=" + l.Config.Memory,
			"--archives-dir=/var/lib/keelson/images.d",
			"--insecure-registry=" + l.registryAddress(), "--registry-mirror=*=" + l.registryAddress(),
		}
		for _, cp := range l.hosts(RoleControlPlane) {
			args = append(args, "--server="+cp.At(FleetPort))
		}
		if l.Config.PodNetwork != "" {
			args = append(args, "--pod-network="+l.Config.PodNetwork)
		}
		return args
	default:
		return []string{l.bin("kctl"), "lab", "serve-registry", "--listen=" + l.registryAddress(),
			"--folder=/var/lib/keelson/registry"}
	}
}

func (l *Lab) registryAddress() string {
	h, _ := l.Host("registry")
	return h.At(RegistryPort)
}

// adminKubeconfig is where 'init' writes the administrator's kubeconfig on the first replica's disk.
const adminKubeconfig = "lib/controlplane/admin.kubeconfig"

// initResult is what 'keelson-controlplane init' prints.
type initResult struct {
	NodeToken         string `json:"nodeToken"`
	ControlPlaneToken string `json:"controlPlaneToken"`
	Kubeconfig        string `json:"kubeconfig"` // path on the host
}

// initCluster makes the trust of the cluster on the first replica's disk.
func (l *Lab) initCluster(ctx context.Context) (initResult, []byte, error) {
	first := l.hosts(RoleControlPlane)[0]
	pods, services := l.Config.Ranges()
	cmd := first.Command(ctx, l.program(first, "keelson-controlplane"), "init",
		"--name="+first.Name, "--data-dir=/var/lib/keelson/controlplane", "--advertise-address="+first.IP.String(),
		"--cluster-name="+strings.ReplaceAll(root, "@", "-"), "--cluster-cidr="+pods, "--service-cidr="+services,
		"--kubeconfig-server=https://"+l.Config.Listen, "--output=json",
		"--node-token-uses="+strconv.Itoa(max(1, len(l.hosts(RoleWorker)))),
		"--replica-token-uses="+strconv.Itoa(max(1, len(l.hosts(RoleControlPlane))-1)))
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

// joinReplica makes a further replica fetch the cluster's trust from the first.
func (l *Lab) joinReplica(ctx context.Context, h Host, token string) error {
	first := l.hosts(RoleControlPlane)[0]
	args := []string{l.program(h, "keelson-controlplane"), "join",
		"--name=" + h.Name, "--data-dir=/var/lib/keelson/controlplane", "--advertise-address=" + h.IP.String(),
		"--token=" + token, "--server=" + first.At(FleetPort)}
	if h.Standby {
		args = append(args, "--standby")
	}
	cmd := h.Command(ctx, args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("joining replica %s: %w: %s", h.Name, err, out)
	}
	return nil
}

// giveToken puts the join token where the worker's agent reads it.
func (h Host) giveToken(token string) error {
	return os.WriteFile(filepath.Join(h.stateDir(), "etc", "token"), []byte(token), 0o600)
}

// giveImages links the example archives into the worker's air-gap folder.
func (l *Lab) giveImages(h Host) error {
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
