// Package execute carries out the steps of package plan on the machines of a cluster file. It
// connects to them by SSH, and runs the scripts and programs of a release there. The number of
// concurrent operations and the time of each are limited. After an interruption, a new plan
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

// Maximum numbers of concurrent connection attempts, uploads, and installations of agents.
const (
	maxConnects = 16
	maxUploads  = 4
	maxAgents   = 8
)

// Time limits of operations on one machine.
const (
	uploadTimeout  = 30 * time.Minute
	installTimeout = 15 * time.Minute
	apiTimeout     = 2 * time.Minute // one kctl command; a slow machine must load the program first
	drainTimeout   = 10 * time.Minute
	readyTimeout   = 5 * time.Minute // to wait until a replica or node is ready
	pollInterval   = time.Second     // time between two checks of readiness
)

// Site holds the SSH connections to the machines of a cluster file, and runs operations on them. It
// is safe for concurrent use.
type Site struct {
	Cluster machines.Cluster
	Release plan.Release // the release that Install installs; unused by other methods
	Out     io.Writer    // progress lines
	// Leaving is the name of a machine that is about to be removed. kctl is never run on it.
	Leaving string

	began      time.Time
	mu         sync.Mutex // also protects Out
	conns      map[string]*machines.Machine
	facts      map[string]machines.Facts
	admins     map[string]bool // machines with a replica and an administrator's kubeconfig
	leaderless map[string]bool // machines of admins; true if the replica last reported no leader
}

// Connect connects to machines of the cluster file in parallel, and reads their facts. It changes
// nothing on them. With names, it connects only to these machines. It returns an Observation with
// the facts or the error of each machine. Later operations of the Site print progress to out.
func Connect(ctx context.Context, c machines.Cluster, out io.Writer, names ...string) (
	*Site, map[string]plan.Observation,
) {
	s := &Site{Cluster: c, Out: out, began: time.Now(), conns: map[string]*machines.Machine{},
		facts: map[string]machines.Facts{}, admins: map[string]bool{}, leaderless: map[string]bool{}}
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
	_ = g.Wait() // seen contains the error of each machine
	return s, seen
}

// Close closes the connections to all machines.
func (s *Site) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.conns {
		m.Close()
	}
}

// Facts returns the facts of the machines that Connect reached, by name.
func (s *Site) Facts() map[string]machines.Facts { return s.facts }

// Printf prints a progress line to Out, with the seconds since Connect.
func (s *Site) Printf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.Out, "%6.1fs  %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

// runScript runs a shell script as root on the named machine, with input as its standard input, and
// returns its standard output. It fails after the time limit. If the connection has failed, the
// next call connects again.
func (s *Site) runScript(ctx context.Context, name string, limit time.Duration, script string, input io.Reader) (
	string, error,
) {
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

// connection returns the SSH connection to the named machine. It connects if there is no connection
// yet, or if the previous connection was dropped after an error.
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

// adminMachines returns the names of the machines that can run kctl as an administrator, in the
// order of the cluster file. If the replica of a machine last reported no leader, the machine comes
// last. The machine s.Leaving is omitted.
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

var errNoAdmin = errors.New("no machine of the file has both a replica and an administrator's " +
	"kubeconfig: the cluster cannot be queried")

// Kctl runs kctl with the given arguments on a machine with an administrator's kubeconfig, and
// returns its output. If the cluster does not respond there, it tries the next such machine. limit
// is the maximum time on each machine.
func (s *Site) Kctl(ctx context.Context, limit time.Duration, words ...string) (string, error) {
	return s.runKctl(ctx, limit, words...)
}

// DaemonVersions runs keelson-controlplane and keelson-agent from a release tarball with --version,
// and returns their output. It runs them on the named machine, to which the tarball must have been
// uploaded.
func (s *Site) DaemonVersions(ctx context.Context, name string, tarball plan.File) (
	controlplane, agent string, err error,
) {
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

// versionSeparator is a line in the output of the script that DaemonVersions runs. It separates the
// version of keelson-controlplane from the version of keelson-agent.
const versionSeparator = "-----"

// noAnswerTexts are parts of error texts of kctl. An error with such a text does not come from the
// cluster, and kctl is run on another machine. A cause may be that the replica is not available,
// has no leader, or refuses the kubeconfig, for example because it has expired. Another cause is
// that the kctl on the machine is too old for the command.
var noAnswerTexts = []string{
	"connection refused", "connection to the server", "no api answers", "does not resolve", "connect to the server",
	"no route to host", "network is unreachable", "connection reset",
	"broken pipe", "connection lost", "connection has ended", "connection ended", "i/o timeout", "handshake timeout",
	"client.timeout", "context deadline exceeded", ": eof", "unexpected eof",
	"no leader", "serviceunavailable", "internalerror", "(timeout)", "unable to handle the request",
	"in the time allotted",
	"x509: ", "tls: ", "unauthorized", "logged in to the server", "admin.kubeconfig", "invalid configuration",
	"unknown flag", "unknown command",
}

// isClusterAnswer reports whether the cluster itself returned this error of kctl, such as "not
// found". Another machine would then return the same error, so kctl is not run there.
func isClusterAnswer(err error) bool {
	var failed *machines.CommandError
	if !errors.As(err, &failed) || failed.Status != 1 {
		return false // the machine was not reached, or kctl did not exit by itself
	}
	said := strings.ToLower(failed.Output)
	return !slices.ContainsFunc(noAnswerTexts, func(words string) bool { return strings.Contains(said, words) })
}

// runKctl does the same as Kctl, for callers in this package.
func (s *Site) runKctl(ctx context.Context, limit time.Duration, words ...string) (string, error) {
	return s.runKctlOn(ctx, s.adminMachines(), limit, words...)
}

// runKctlOn runs kctl with the given arguments on each of the named machines in turn, until the
// cluster responds. It returns the output of kctl. timeout is the maximum time on each machine. An
// error that the cluster itself returned ends the search and is returned. If the cluster responds
// on no machine, the errors of all machines are returned.
func (s *Site) runKctlOn(ctx context.Context, names []string, timeout time.Duration, words ...string) (string, error) {
	script := kctlScript(words)
	var errs []error
	for _, name := range names {
		out, err := s.runScript(ctx, name, timeout, script, nil)
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

// kctlScript returns a shell script that runs the kctl of a machine with the administrator's
// kubeconfig on that machine. Each of words is one argument. The proxy settings of the machine, for
// example in /etc/environment, are not used, because they are for other networks.
func kctlScript(words []string) string {
	// The discovery cache of kctl is below machines.Cache, which is removed as a whole.
	script := `unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY; root=${DESTDIR:-}; export ` +
		`KUBECACHEDIR="$root` + machines.Cache + `/kube"; exec "$root/usr/bin/kctl" --kubeconfig "$root` +
		adminKubeconfig + `"`
	for _, w := range words {
		script += " " + machines.ShellQuote(w)
	}
	return script
}

const adminKubeconfig = "/var/lib/keelson/controlplane/admin.kubeconfig"

// Kubeconfig returns the content of an administrator's kubeconfig, which it reads from a machine
// with a replica. If a machine cannot be read, it tries the next one.
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
