// Package execute has plans for machines carried out: it reaches the machines by ssh, side by side and bounded in number and time,
// and has the scripts and programs of a release do the work. Whatever was cut off is made up for by the next plan.
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

// Bounds of what is under way at once: questions, uploads, installations of agents.
const (
	askAtOnce    = 16
	uploadAtOnce = 4
	agentsAtOnce = 8
)

// Bounds of one thing on one machine.
const (
	uploadLimit  = 30 * time.Minute
	installLimit = 15 * time.Minute
	apiLimit     = 2 * time.Minute // a question to the API, asked by a kctl that a slow machine has to load first
	drainLimit   = 10 * time.Minute
	readyLimit   = 5 * time.Minute // until a replica or a node is of use
	pollEvery    = time.Second     // how often that is asked
)

// Site are the machines of a cluster file, as far as they were reached.
type Site struct {
	Cluster machines.Cluster
	Release plan.Release // what Do installs; not needed for other deeds
	Out     io.Writer    // of lines about what is being done
	// Apart is a machine that the cluster is never asked through: it is about to leave.
	Apart string

	began time.Time
	mu    sync.Mutex // also of Out
	conns map[string]*machines.Machine
	facts map[string]machines.Facts
	found map[string]bool // machines that have a replica and an administrator's kubeconfig now
	lost  map[string]bool // of these, such whose replica knew of no leader when it was asked last: others are asked before them
}

// Reach connects to machines side by side, and asks each what it is and has. Machines are only looked at.
func Reach(ctx context.Context, c machines.Cluster, out io.Writer, names ...string) (*Site, map[string]plan.Seen) {
	s := &Site{Cluster: c, Out: out, began: time.Now(), conns: map[string]*machines.Machine{}, facts: map[string]machines.Facts{}, found: map[string]bool{}, lost: map[string]bool{}}
	seen := map[string]plan.Seen{}
	var g errgroup.Group
	g.SetLimit(askAtOnce)
	for _, h := range c.Hosts {
		if len(names) > 0 && !slices.Contains(names, h.Name) {
			continue
		}
		g.Go(func() error {
			var one plan.Seen
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
				s.found[h.Name] = one.Facts.ReplicaWhole && one.Facts.Admin
			}
			return nil
		})
	}
	_ = g.Wait() // each machine's error is its own
	return s, seen
}

// Close ends all connections.
func (s *Site) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.conns {
		m.Close()
	}
}

// Facts are those of the machines that were reached.
func (s *Site) Facts() map[string]machines.Facts { return s.facts }

// Tell writes a line about what is being done, with the time since the machines were reached.
func (s *Site) Tell(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.Out, "%6.1fs  %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

// run has root's shell on a machine run a script, within a time.
func (s *Site) run(ctx context.Context, name string, limit time.Duration, script string, input io.Reader) (string, error) {
	m, err := s.machine(ctx, name)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it took longer than %v", limit))
	defer cancel()
	out, err := m.Run(ctx, script, input)
	var failed *machines.Failed
	if err != nil && !errors.As(err, &failed) {
		s.drop(name, m) // the next one reaches it anew
	}
	return out, err
}

// machine is a connection to a machine, made anew where the last one has ended.
func (s *Site) machine(ctx context.Context, name string) (*machines.Machine, error) {
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

func (s *Site) drop(name string, m *machines.Machine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns[name] == m {
		delete(s.conns, name)
		m.Close()
	}
}

// administrators are machines through which the cluster can be asked, in the file's order; those that know of no leader come last.
func (s *Site) administrators() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.Cluster.Hosts {
		if s.found[h.Name] && h.Name != s.Apart {
			names = append(names, h.Name)
		}
	}
	slices.SortStableFunc(names, func(a, b string) int {
		switch {
		case s.lost[a] == s.lost[b]:
			return 0
		case s.lost[a]:
			return 1
		}
		return -1
	})
	return names
}

func (s *Site) isAdministrator(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.found[name] = true
}

var errNobody = errors.New("no machine of the file has both a replica and an administrator's kubeconfig: the cluster cannot be asked")

// Kctl asks the cluster through the first of its machines that gets an answer, within a time.
func (s *Site) Kctl(ctx context.Context, limit time.Duration, words ...string) (string, error) {
	return s.kctl(ctx, limit, words...)
}

// Says is what the daemons of a release that lies in a machine's cache say when they are asked for --version.
func (s *Site) Says(ctx context.Context, name string, tarball plan.File) (controlplane, agent string, err error) {
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
"$work/%[3]s/usr/bin/keelson-agent" --version || true`, machines.Cache, tarball.Sum, top, between)
	out, err := s.run(ctx, name, installLimit, script, nil)
	if err != nil {
		return "", "", fmt.Errorf("asking %s for its release: %w", tarball.Name, err)
	}
	controlplane, agent, _ = strings.Cut(out, between+"\n")
	return controlplane, agent, nil
}

// between stands between what two programs say.
const between = "-----"

// noAnswer are words of a kctl that asked in vain: the replica of its machine is not there, does not lead or know who does, or does not
// let it in, as with a kubeconfig that has expired; or the kctl is of a release that cannot ask that. Another one may answer.
var noAnswer = []string{
	"connection refused", "connection to the server", "no api answers", "does not resolve", "connect to the server", "no route to host", "network is unreachable", "connection reset",
	"broken pipe", "connection lost", "connection has ended", "connection ended", "i/o timeout", "handshake timeout", "client.timeout", "context deadline exceeded", ": eof", "unexpected eof",
	"no leader", "serviceunavailable", "internalerror", "(timeout)", "unable to handle the request", "in the time allotted",
	"x509: ", "tls: ", "unauthorized", "logged in to the server", "admin.kubeconfig", "invalid configuration", "unknown flag", "unknown command",
}

// answered says whether a kctl that failed had an answer, which is that of the cluster: then no other machine is asked.
func answered(err error) bool {
	var failed *machines.Failed
	if !errors.As(err, &failed) || failed.Status != 1 {
		return false // the machine was not reached, or has no kctl that runs to its end
	}
	said := strings.ToLower(failed.Said)
	return !slices.ContainsFunc(noAnswer, func(words string) bool { return strings.Contains(said, words) })
}

// kctl asks the cluster through the first of its machines that gets an answer. Each word is one of the command line.
func (s *Site) kctl(ctx context.Context, limit time.Duration, words ...string) (string, error) {
	return s.kctlAt(ctx, s.administrators(), limit, words...)
}

// kctlAt asks the first of some machines that gets an answer. That the cluster refuses is one.
func (s *Site) kctlAt(ctx context.Context, at []string, limit time.Duration, words ...string) (string, error) {
	script := kctlScript(words)
	var errs []error
	for _, name := range at {
		out, err := s.run(ctx, name, limit, script, nil)
		if err == nil {
			return out, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil || answered(err) {
			break
		}
	}
	if len(errs) == 0 {
		return "", errNobody
	}
	return "", errors.Join(errs...)
}

// kctlScript has a machine's own kctl run. It asks replicas: a proxy that the machine's sessions are told of, as by /etc/environment,
// is the way to other networks.
func kctlScript(words []string) string {
	// What kctl keeps of the API goes with what else is in the folder.
	script := `unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; root=${DESTDIR:-}; export KUBECACHEDIR="$root` + machines.Cache + `/kube"; exec "$root/usr/bin/kctl" --kubeconfig "$root` + adminKubeconfig + `"`
	for _, w := range words {
		script += " " + machines.Quoted(w)
	}
	return script
}

const adminKubeconfig = "/var/lib/keelson/controlplane/admin.kubeconfig"

// Kubeconfig is an administrator's, as a machine of the control plane has it.
func (s *Site) Kubeconfig(ctx context.Context) ([]byte, error) {
	var errs []error
	for _, name := range s.administrators() {
		out, err := s.run(ctx, name, apiLimit, `cat "${DESTDIR:-}`+adminKubeconfig+`"`, nil)
		if err == nil && strings.TrimSpace(out) != "" {
			return []byte(out), nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return nil, errNobody
	}
	return nil, fmt.Errorf("reading the administrator's kubeconfig: %w", errors.Join(errs...))
}
