package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// programs are what a host of each role runs, its daemon first.
var programs = map[Role][]string{
	RoleControlPlane: {"keelson-controlplane"},
	RoleWorker:       {"keelson-agent", "keelson-shim", "keelson-oci", "keelson-pause"},
}

// Replace has a host run the programs of another folder from now on: its daemon is stopped in good order and started from
// there, and containers stay. It returns when the replica is ready, or the worker's agent has a session and its node is
// Ready. "" is the lab's own folder. Nothing is stopped for a folder that lacks a program; where the new daemon does not
// become ready the host stays with it, for somebody to look at.
func (l *Lab) Replace(ctx context.Context, name, dir string) error {
	i, dir, err := l.replacement(name, dir)
	if err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	var before map[string]string
	if l.Config.Hosts[i].Role == RoleWorker {
		if before, err = l.sessionsOnceServed(ctx); err != nil {
			return fmt.Errorf("lab: %w", err)
		}
	}
	if err := l.Stop(ctx, name); err != nil {
		return err
	}
	l.Config.Hosts[i].BinDir = dir
	if err := l.save(); err != nil {
		return fmt.Errorf("lab: writing state: %w", err)
	}
	h := l.Config.Hosts[i]
	if err := l.start(h); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	if h.Role == RoleControlPlane {
		err = l.waitReady(ctx, h)
	} else {
		err = l.waitNode(ctx, h, before)
	}
	if err != nil {
		return fmt.Errorf("lab: host %s runs the programs in %s now: %w", name, filepath.Dir(l.program(h, "x")), err)
	}
	return nil
}

// replacement finds the host, and refuses a folder from which it could not run; dir is then as a host keeps it.
func (l *Lab) replacement(name, dir string) (i int, kept string, err error) {
	h, err := l.Host(name)
	if err != nil {
		return 0, "", errors.New(strings.TrimPrefix(err.Error(), "lab: "))
	}
	if programs[h.Role] == nil {
		return 0, "", fmt.Errorf("host %s is neither a replica nor a worker: its programs are the lab's", name)
	}
	if !exists(h.NetNS()) || !exists(h.MountNS()) {
		return 0, "", fmt.Errorf("host %s has no power: start it with 'kctl lab restart %s' first", name, name)
	}
	if dir == "" {
		dir = l.Config.BinDir
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return 0, "", fmt.Errorf("folder %s: %w", dir, err)
	}
	if err := hasPrograms(dir, h.Role); err != nil {
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

// hasPrograms refuses a folder that lacks a program that hosts of the role run.
func hasPrograms(dir string, role Role) error {
	for _, p := range programs[role] {
		if info, err := os.Stat(filepath.Join(dir, p)); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return fmt.Errorf("%s is no program in %s", p, dir)
		}
	}
	return nil
}

// waitNode waits until a worker has another session than before, and is Ready in the API.
func (l *Lab) waitNode(ctx context.Context, h Host, before map[string]string) error {
	one := &Lab{Config: l.Config}
	one.Config.Hosts = []Host{h}
	return one.waitNodes(ctx, before, func(string, ...any) {})
}
