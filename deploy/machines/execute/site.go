// Package execute carries out plans on machines. It reaches them by SSH, with limits on concurrency
// and time, and runs the scripts and programs of a release. After an interruption, the next plan
// contains the remaining steps.
package execute

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"keelson.dev/keelson/deploy/machines"
	"keelson.dev/keelson/deploy/machines/plan"
)

// Limits of concurrent connections, uploads, and agent installations.
const (
	maxConnects = 16
	maxUploads  = 4
	maxAgents   = 8
)

// Time limits of one operation on one machine.
const (
	uploadTimeout  = 30 * time.Minute
	installTimeout = 15 * time.Minute
	apiTimeout     = 2 * time.Minute // a kctl command; a slow machine must load the program first
	drainTimeout   = 10 * time.Minute
	readyTimeout   = 5 * time.Minute // until a replica or a node is ready
	pollInterval   = time.Second     // between checks of readiness
)

// Site holds the connections to the reached machines of a cluster file.
type Site struct {
	Cluster machines.Cluster
	Release plan.Release // the release that Install installs; not used otherwise
	Out     io.Writer    // progress lines
	// Leaving is a machine that is about to be removed. It is never used to query the cluster.
	Leaving string

	began      time.Time
	mu         sync.Mutex // also protects Out
	conns      map[string]*machines.Machine
	facts      map[string]machines.Facts
	admins     map[string]bool // machines with a replica and an administrator's kubeconfig
	leaderless map[string]bool // admin machines tried last: their replica last reported no leader
}

// Connect connects to machines in parallel and reads their facts. It changes nothing on them.
func Connect(ctx context.Context, c machines.Cluster, out io.Writer, names ...string) (*Site, map[string]plan.Observation) {
	s := &Site{Cluster: c, Out: out, began: time.Now(), conns: map[string]*machines.Machine{}, facts: map[string]machines.Facts{}, admins: map[string]bool{}, leaderless: map[string]bool{}}
	seen := map[string]plan.Observation{}
	var g errgroup.Group
	g.SetLimit(maxConnects)
	for _, h := range c.Hosts {
		if len(names) > 0 && !slices.Contains(names, h.Name) {
			continue
		}
		g.Go(func() error {
			var one plan.Observation
			m, err := machines.Dial(ctx, h)
			if err == nil {
				one.Facts, err = m.ReadFacts(ctx)
			}
			one.Err = err
			s.mu.Lock()
			defer s.mu.Unlock()
			seen[h.Name] = one
			if m != nil {
				s.conns[h.Name] = m
			}
			if err == nil {
				s.facts[h.Name] = one.Facts
				s.admins[h.Name] = one.Facts.ReplicaWhole && one.Facts.Admin
			}
			return nil
		})
	}
	_ = g.Wait() // each machine's error is in seen
	return s, seen
}

// Close closes all connections.
func (s *Site) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.conns {
		m.Close()
	}
}

// Facts returns the facts of the reached machines.
func (s *Site) Facts() map[string]machines.Facts { return s.facts }

// Printf prints a progress line with the time since Connect.
func (s *Site) Printf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.Out, "%6.1fs  %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

// runScript runs a script in root's shell on a machine, with a time limit.
func (s *Site) runScript(ctx context.Context, name string, limit time.Duration, script string, input io.Reader) (string, error) {
	m, err := s.connection(ctx, name)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it took longer than %v", limit))
	defer cancel()
	out, err := m.Run(ctx, script, input)
	var failed *machines.CommandError
	if err != nil && !errors.As(err, &failed) {
		s.dropConnection(name, m) // the next call connects again
	}
	return out, err
}

// connection returns a connection to a machine. It connects again if the last connection was
// closed.
func (s *Site) connection(ctx context.Context, name string) (*machines.Machine, error) {
	s.mu.Lock()
	m := s.conns[name]
	s.mu.Unlock()
	if m != nil {
		return m, nil
	}
	h, err := s.Cluster.Host(name)
	if err != nil {
		return nil, err
	}
	if m, err = machines.Dial(ctx, h); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if other := s.conns[name]; other != nil {
		m.Close()
		return other, nil
	}
	s.conns[name] = m
	return m, nil
}

func (s *Site) dropConnection(name string, m *machines.Machine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns[name] == m {
		delete(s.conns, name)
		m.Close()
	}
}

// adminMachines returns the machines that can query the cluster, in the file's order; machines
// without a known leader come last.
func (s *Site) adminMachines() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.Cluster.Hosts {
		if s.admins[h.Name] && h.Name != s.Leaving {
			names = append(names, h.Name)
		}
	}
	slices.SortStableFunc(names, func(a, b string) int {
		switch {
		case s.leaderless[a] == s.leaderless[b]:
			return 0
		case s.leaderless[a]:
			return 1
		}
		return -1
	})
	return names
}

func (s *Site) markAdmin(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.admins[name] = true
}

var errNoAdmin = errors.New("no machine of the file has both a replica and an administrator's kubeconfig: the cluster cannot be queried")

// Kctl runs kctl on the first machine that gets an answer from the cluster, with a time limit for
// each.
func (s *Site) Kctl(ctx context.Context, limit time.Duration, words ...string) (string, error) {
	return s.runKctl(ctx, limit, words...)
}

// DaemonVersions returns the output of --version of the daemons in a release tarball in a machine's
// cache.
func (s *Site) DaemonVersions(ctx context.Context, name string, tarball plan.File) (controlplane, agent string, err error) {
	top := strings.TrimSuffix(tarball.Name, ".tar.gz")
	script := fmt.Sprintf(`set -eu
cd "${DESTDIR:-}%[1]s"
work=$(mktemp -d "$PWD/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
echo '%[2]s  %[3]s.tar.gz' | sha256sum -c --status || { echo "%[3]s.tar.gz in $PWD is not what was put there" >&2; exit 1; }
tar -xzf %[3]s.tar.gz -C "$work" --no-same-owner %[3]s/usr/bin/keelson-controlplane %[3]s/usr/bin/keelson-agent
"$work/%[3]s/usr/bin/keelson-controlplane" --version
echo %[4]s
"$work/%[3]s/usr/bin/keelson-agent" --version || true`, machines.Cache, tarball.Sum, top, versionSeparator)
	out, err := s.runScript(ctx, name, installTimeout, script, nil)
	if err != nil {
		return "", "", fmt.Errorf("asking %s for its release: %w", tarball.Name, err)
	}
	controlplane, agent, _ = strings.Cut(out, versionSeparator+"\n")
	return controlplane, agent, nil
}

// versionSeparator separates the outputs of the two programs.
const versionSeparator = "-----"

// noAnswerTexts are parts of kctl errors that are not an answer of the cluster: the machine's
// replica is not available, has no leader, or refuses the kubeconfig (for example because it has
// expired), or the kctl is too old for the command. Another machine may get an answer.
var noAnswerTexts = []string{
	"connection refused", "connection to the server", "no api answers", "does not resolve", "connect to the server", "no route to host", "network is unreachable", "connection reset",
	"broken pipe", "connection lost", "connection has ended", "connection ended", "i/o timeout", "handshake timeout", "client.timeout", "context deadline exceeded", ": eof", "unexpected eof",
	"no leader", "serviceunavailable", "internalerror", "(timeout)", "unable to handle the request", "in the time allotted",
	"x509: ", "tls: ", "unauthorized", "logged in to the server", "admin.kubeconfig", "invalid configuration", "unknown flag", "unknown command",
}

// isClusterAnswer reports whether a kctl error is the cluster's own answer. Then no other machine
// is tried.
func isClusterAnswer(err error) bool {
	var failed *machines.CommandError
	if !errors.As(err, &failed) || failed.Status != 1 {
		return false // the machine was not reached, or its kctl did not finish
	}
	said := strings.ToLower(failed.Output)
	return !slices.ContainsFunc(noAnswerTexts, func(words string) bool { return strings.Contains(said, words) })
}

// runKctl runs kctl on the first machine that gets an answer from the cluster. Each word is one
// argument.
func (s *Site) runKctl(ctx context.Context, limit time.Duration, words ...string) (string, error) {
	return s.runKctlOn(ctx, s.adminMachines(), limit, words...)
}

// runKctlOn runs kctl on the first of some machines that gets an answer. A refusal by the cluster
// is an answer.
func (s *Site) runKctlOn(ctx context.Context, at []string, limit time.Duration, words ...string) (string, error) {
	script := kctlScript(words)
	var errs []error
	for _, name := range at {
		out, err := s.runScript(ctx, name, limit, script, nil)
		if err == nil {
			return out, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil || isClusterAnswer(err) {
			break
		}
	}
	if len(errs) == 0 {
		return "", errNoAdmin
	}
	return "", errors.Join(errs...)
}

// kctlScript returns a script that runs the machine's own kctl. It ignores proxy settings of the
// machine, for example in /etc/environment, which are for other networks.
func kctlScript(words []string) string {
	// The discovery cache is removed with the rest of the folder.
	script := `unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; root=${DESTDIR:-}; export KUBECACHEDIR="$root` + machines.Cache + `/kube"; exec "$root/usr/bin/kctl" --kubeconfig "$root` + adminKubeconfig + `"`
	for _, w := range words {
		script += " " + machines.ShellQuote(w)
	}
	return script
}

const adminKubeconfig = "/var/lib/keelson/controlplane/admin.kubeconfig"

// Kubeconfig returns an administrator's kubeconfig from a machine of the control plane.
func (s *Site) Kubeconfig(ctx context.Context) ([]byte, error) {
	var errs []error
	for _, name := range s.adminMachines() {
		out, err := s.runScript(ctx, name, apiTimeout, `cat "${DESTDIR:-}`+adminKubeconfig+`"`, nil)
		if err == nil && strings.TrimSpace(out) != "" {
			return []byte(out), nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return nil, errNoAdmin
	}
	return nil, fmt.Errorf("reading the administrator's kubeconfig: %w", errors.Join(errs...))
}
