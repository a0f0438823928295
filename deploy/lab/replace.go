package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// requiredPrograms are the names of the programs that a host needs, by the role of the host. The
// first program is the daemon.
var requiredPrograms = map[Role][]string{
	RoleControlPlane: {"keelson-controlplane"},
	RoleWorker:       {"keelson-agent", "keelson-shim", "keelson-oci", "keelson-pause"},
}

// Replace upgrades the named host to the programs in the folder dir; "" means Config.BinDir. It
// stops the daemon gracefully, and starts the new daemon; containers continue. It returns when the
// replica is ready, or when the agent has a new session and its Node is Ready.
//
// If the folder lacks a program, Replace returns an error and stops nothing. If the new daemon does
// not become ready, the host keeps the new programs, so that it can be inspected.
func (l *Lab) Replace(ctx context.Context, name, dir string) error {
	i, dir, err := l.checkReplacement(name, dir)
	if err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	var before map[string]string
	if l.Config.Hosts[i].Role == RoleWorker {
		if before, err = l.readiness().awaitSessions(ctx); err != nil {
			return fmt.Errorf("lab: %w", err)
		}
	}
	if err := l.Stop(ctx, name); err != nil {
		return err
	}
	l.Config.Hosts[i].BinDir = dir
	if err := l.saveConfig(); err != nil {
		return fmt.Errorf("lab: writing state: %w", err)
	}
	h := l.Config.Hosts[i]
	if err := l.hosts().startDaemon(h); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	if h.Role == RoleControlPlane {
		err = l.readiness().waitReady(ctx, h)
	} else {
		err = l.readiness().waitNode(ctx, h, before)
	}
	if err != nil {
		return fmt.Errorf("lab: host %s runs the programs in %s now: %w", name,
			filepath.Dir(l.hosts().programPath(h, "x")), err)
	}
	return nil
}

// checkReplacement checks whether Replace may use the folder dir for the named host. It returns the
// index of the host in Config.Hosts, and the new value of the host's field BinDir. It returns an
// error if the host is not a replica or worker, is not running, or if the folder lacks a program.
func (l *Lab) checkReplacement(name, dir string) (i int, binDir string, err error) {
	h, err := l.Host(name)
	if err != nil {
		return 0, "", errors.New(strings.TrimPrefix(err.Error(), "lab: "))
	}
	if requiredPrograms[h.Role] == nil {
		return 0, "", fmt.Errorf("host %s is neither a replica nor a worker: its programs are the lab's", name)
	}
	if !fileExists(h.NetNS()) || !fileExists(h.MountNS()) {
		return 0, "", fmt.Errorf("host %s has no power: start it with 'kctl lab restart %s' first", name, name)
	}
	if dir == "" {
		dir = l.Config.BinDir
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return 0, "", fmt.Errorf("folder %s: %w", dir, err)
	}
	if err := checkPrograms(dir, h.Role); err != nil {
		return 0, "", fmt.Errorf("%w: host %s was left as it is", err, name)
	}
	if dir == l.Config.BinDir {
		dir = ""
	}
	for i = range l.Config.Hosts {
		if l.Config.Hosts[i].Name == name {
			break
		}
	}
	return i, dir, nil
}

// checkPrograms returns an error if the folder dir lacks an executable program that a host with the
// role needs.
func checkPrograms(dir string, role Role) error {
	for _, p := range requiredPrograms[role] {
		if info, err := os.Stat(filepath.Join(dir, p)); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return fmt.Errorf("%s is no program in %s", p, dir)
		}
	}
	return nil
}

// waitNode waits until the Node of worker h is Ready and its agent has started a session that is
// not in previous. previous is an earlier result of nodeSessions.
func (r readiness) waitNode(ctx context.Context, h Host, previous map[string]string) error {
	one := &Lab{Config: r.lab.Config}
	one.Config.Hosts = []Host{h}
	return one.readiness().waitNodes(ctx, previous, func(string, ...any) {})
}
