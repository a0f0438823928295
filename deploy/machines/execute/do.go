package execute

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"keelson.dev/keelson/deploy/machines"
	"keelson.dev/keelson/deploy/machines/plan"
	"keelson.dev/keelson/internal/wait"
)

// Install carries out what plan.Make has planned: uploads first, side by side; then replicas, one after the other, each ready before
// the next; then an agent, and the others side by side; then it waits until the nodes are ready, and gives them their labels and taints.
func (s *Site) Install(ctx context.Context, steps []plan.Step) error {
	steps = plan.InOrder(steps)
	if err := s.upload(ctx, of(steps, plan.Upload)); err != nil {
		return err
	}
	if err := s.replicas(ctx, of(steps, plan.ControlPlane)); err != nil {
		return err
	}
	agents := of(steps, plan.Agent)
	if err := s.agents(ctx, agents); err != nil {
		return err
	}
	begun := names(agents)
	names := slices.Clone(begun)
	for _, m := range of(steps, plan.Mark) {
		if !slices.Contains(names, m.Machine) {
			names = append(names, m.Machine)
		}
	}
	if len(names) == 0 {
		return nil
	}
	nodes, err := s.awaitNodes(ctx, names, begun)
	if err != nil {
		return err
	}
	return s.marks(ctx, names, nodes)
}

// of are the steps of a deed.
func of(steps []plan.Step, d plan.Deed) (out []plan.Step) {
	for _, s := range steps {
		if s.Do == d {
			out = append(out, s)
		}
	}
	return out
}

func names(steps []plan.Step) (out []string) {
	for _, s := range steps {
		out = append(out, s.Machine)
	}
	return out
}

func (s *Site) upload(ctx context.Context, steps []plan.Step) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(uploadAtOnce)
	for _, step := range steps {
		g.Go(func() error {
			for _, f := range step.Files {
				if err := s.put(ctx, step.Machine, f); err != nil {
					return fmt.Errorf("uploading %s to %s: %w", f.Name, step.Machine, err)
				}
			}
			s.Tell("%s has the release", step.Machine)
			return nil
		})
	}
	return g.Wait()
}

func (s *Site) put(ctx context.Context, name string, file plan.File) error {
	f, err := os.Open(file.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	m, err := s.machine(ctx, name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, uploadLimit, fmt.Errorf("it took longer than %v", uploadLimit))
	defer cancel()
	return m.Put(ctx, f, file.Size, machines.Cache+"/"+file.Name, 0o600)
}

// replicas makes and changes them.
func (s *Site) replicas(ctx context.Context, steps []plan.Step) error {
	var begun []string // replicas of a cluster that does not answer: it may need several to answer
	for _, step := range steps {
		if step.Begin == "" {
			_, err := s.members(ctx)
			switch {
			case err != nil && s.startsAnyway(step.Machine):
				if err := s.install(ctx, step, ""); err != nil {
					return err
				}
				begun = append(begun, step.Machine)
				continue
			case err != nil && len(begun) == 0:
				return fmt.Errorf("%s is not restarted: enough replicas run for the cluster to answer, and it does not, so that nobody can tell whether the others can spare one. "+
					"See to that and run it again, or stop keelson-controlplane where it is of no use: what is stopped is started. %w", step.Machine, err)
			}
		}
		if len(begun) > 0 {
			if err := s.awaitReplicas(ctx, begun); err != nil {
				return err
			}
			begun = nil
		}
		if step.Begin == "" {
			if err := s.maySpare(ctx, step.Machine); err != nil {
				return err
			}
		}
		if err := s.replica(ctx, step); err != nil {
			return err
		}
	}
	if len(begun) > 0 {
		return s.awaitReplicas(ctx, begun)
	}
	return nil
}

// startsAnyway says whether a replica of a cluster that does not answer may be started, or started again: it did not run when the machines
// were looked at, or so few did that the cluster stood still. A cluster may be silent for other reasons, such as an administrator's
// kubeconfig that has expired, while its replicas serve; those must not be restarted one after the other without a look.
func (s *Site) startsAnyway(name string) bool {
	unit := machines.ControlPlane.Unit()
	voters, run := 0, 0
	for _, h := range s.Cluster.Replicas() {
		f := s.facts[h.Name]
		if !f.ReplicaWhole || f.Waiting || f.Joining {
			continue
		}
		if voters++; f.Active[unit] {
			run++
		}
	}
	return !s.facts[name].Active[unit] || run < voters/2+1 || voters == 1 // no others wait to be spared
}

func (s *Site) replica(ctx context.Context, step plan.Step) error {
	token := ""
	if step.Begin == plan.Join {
		var err error
		if token, err = s.token(ctx, "controlplane", step.Machine, false); err != nil {
			return fmt.Errorf("a token for %s: %w", step.Machine, err)
		}
	}
	if err := s.install(ctx, step, token); err != nil {
		return err
	}
	if step.Begin == plan.Init || step.Admin {
		s.isAdministrator(step.Machine)
	}
	return s.awaitReplicas(ctx, []string{step.Machine})
}

// maySpare waits until the group does without a replica that is about to be restarted. Of two, both are needed: then there is nothing to
// wait for, and neither is there for one without a vote.
func (s *Site) maySpare(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyLimit, fmt.Errorf("that did not change in %v", readyLimit))
	defer cancel()
	err := wait.For(ctx, pollEvery, func() error {
		members, err := s.members(ctx)
		if err != nil {
			return err
		}
		voters, others := 0, 0
		for other, m := range members {
			if !m.Voter {
				continue
			}
			voters++
			if other != name && m.Ready == "yes" {
				others++
			}
		}
		if voters < 3 || !members[name].Voter || members[name].Ready != "yes" || others > voters/2 {
			return nil
		}
		return fmt.Errorf("of the %d other replicas %d are ready", voters-1, others)
	})
	if err != nil {
		return fmt.Errorf("%s is not restarted, since the cluster would stand still: %w", name, err)
	}
	return nil
}

func (s *Site) awaitReplicas(ctx context.Context, names []string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyLimit, fmt.Errorf("not ready in %v", readyLimit))
	defer cancel()
	standby := map[string]bool{}
	err := wait.For(ctx, pollEvery, func() error {
		members, err := s.members(ctx)
		if err != nil {
			return err
		}
		var errs []error
		for _, name := range names {
			m, ok := members[name]
			standby[name] = m.Standby
			switch {
			case !ok:
				errs = append(errs, fmt.Errorf("%s is no member of the group yet", name))
			case !m.Voter && !m.Standby:
				errs = append(errs, fmt.Errorf("%s is catching up", name))
			case m.Ready != "yes":
				errs = append(errs, fmt.Errorf("%s: %s", name, m.Ready))
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return s.explained(ctx, names[0], machines.ControlPlane, fmt.Errorf("waiting for the replica of %s: %w", strings.Join(names, ", "), err))
	}
	for _, name := range names {
		what := "replica"
		if standby[name] {
			what = "standby"
		}
		s.Tell("%s %s is ready", what, name)
	}
	return nil
}

// agents makes and changes them, the first one alone: what is wrong with a release or a setting of them all costs one worker.
func (s *Site) agents(ctx context.Context, steps []plan.Step) error {
	if len(steps) > 1 {
		if err := s.agent(ctx, steps[0]); err != nil {
			return err
		}
		steps = steps[1:]
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(agentsAtOnce)
	for _, step := range steps {
		g.Go(func() error {
			if ctx.Err() != nil {
				return nil // another one has failed: this one is not begun
			}
			return s.agent(ctx, step)
		})
	}
	return g.Wait()
}

func (s *Site) agent(ctx context.Context, step plan.Step) error {
	token := ""
	if step.Begin == plan.Join {
		var err error
		if token, err = s.token(ctx, "node", step.Machine, step.Replace); err != nil {
			return fmt.Errorf("a token for %s: %w", step.Machine, err)
		}
	}
	return s.install(ctx, step, token)
}

func (s *Site) token(ctx context.Context, role, name string, replace bool) (string, error) {
	words := []string{"cluster", "token", "create", "--role", role, "--names", name, "--ttl", "1h"}
	if replace {
		words = append(words, "--replace")
	}
	out, err := s.kctl(ctx, apiLimit, words...)
	if err == nil && strings.TrimSpace(out) == "" {
		err = errors.New("'kctl cluster token create' says nothing")
	}
	return strings.TrimSpace(out), err
}

// installScript unpacks the release that lies in the machine's cache and has its install.sh do the work. What comes by its input
// may be secret: settings, a token, a kubeconfig, each a word and base64. Of other releases nothing stays in the cache.
const installScript = `set -eu
umask 077
cd "${DESTDIR:-}` + machines.Cache + `"
find . -maxdepth 1 -name 'work.*' -mmin +60 -exec rm -rf {} +
work=$(mktemp -d "$PWD/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
while read -r word value; do printf %%s "$value" | base64 -d >"$work/$word"; done
echo '%[1]s  %[2]s.tar.gz' | sha256sum -c --status || { echo "%[2]s.tar.gz in $PWD is not what was put there" >&2; exit 1; }
(umask 022; tar -xzf %[2]s.tar.gz -C "$work" --no-same-owner)
"$work/%[2]s/install.sh" %[3]s >"$work/said" 2>&1 || { cat "$work/said" >&2; exit 1; }
for f in keelson-*; do
  case $f in %[2]s.tar.gz | %[2]s-images.tar) ;; *) rm -f "$f" ;; esac
done`

// install has install.sh do a step on its machine.
func (s *Site) install(ctx context.Context, step plan.Step, token string) error {
	began := time.Now()
	input := map[string]string{"settings": step.Settings}
	words := []string{"agent", "--settings", `"$work/settings"`}
	if step.Do == plan.ControlPlane {
		words[0] = "server"
	}
	top := strings.TrimSuffix(step.Files[0].Name, ".tar.gz")
	sum := step.Files[0].Sum
	if len(step.Files) > 1 {
		// Its sum was looked at before it was sent, and what is sent comes whole.
		words = append(words, "--images", `"$PWD/`+step.Files[1].Name+`"`, "--sums", `"$work/sums"`)
		input["sums"] = step.Files[1].Sum + "  " + step.Files[1].Name + "\n"
	}
	switch step.Begin {
	case plan.Init:
		words = append(words, "--init")
		for _, f := range step.Flags {
			words = append(words, "--init-flag", machines.Quoted(f))
		}
	case plan.Join:
		words = append(words, "--token-file", `"$work/token"`)
		input["token"] = token + "\n"
		if step.Standby {
			words = append(words, "--standby")
		}
		if step.Do == plan.ControlPlane {
			for _, a := range s.peers(step.Machine) {
				words = append(words, "--server", a)
			}
		}
	}
	if step.Admin {
		admin, err := s.adminFor(ctx, step.Machine)
		if err != nil {
			return fmt.Errorf("an administrator's kubeconfig for %s: %w", step.Machine, err)
		}
		words = append(words, "--admin", `"$work/admin"`)
		input["admin"] = admin
	}
	var in strings.Builder
	for _, word := range []string{"settings", "token", "admin", "sums"} {
		if v, ok := input[word]; ok {
			fmt.Fprintf(&in, "%s %s\n", word, base64.StdEncoding.EncodeToString([]byte(v)))
		}
	}
	script := fmt.Sprintf(installScript, sum, top, strings.Join(words, " "))
	if _, err := s.run(ctx, step.Machine, installLimit, script, strings.NewReader(in.String())); err != nil {
		return fmt.Errorf("%s: %w", step, err)
	}
	s.Tell("%s: %s: done in %.0fs", step.Machine, step, time.Since(began).Seconds())
	return nil
}

// peers are the addresses of replicas that a further one asks to be taken in: those that are there.
func (s *Site) peers(newcomer string) (out []string) {
	for _, name := range s.administrators() {
		if h, err := s.Cluster.Host(name); err == nil && name != newcomer {
			out = append(out, h.Address)
		}
	}
	return out
}
