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

// Install carries out the steps of plan.NewPlan, in the order of plan.SortSteps. It uploads files
// in parallel. Then it changes one replica after the other, and waits until each is ready. Then it
// changes one agent, and after that the other agents in parallel. Finally, it waits until the nodes
// are ready, and sets their labels and taints. It stops at the first error.
func (s *Site) Install(ctx context.Context, steps []plan.Step) error {
	steps = plan.SortSteps(steps)
	if err := s.uploadAll(ctx, stepsWithAction(steps, plan.Upload)); err != nil {
		return err
	}
	if err := s.applyReplicas(ctx, stepsWithAction(steps, plan.ControlPlane)); err != nil {
		return err
	}
	agents := stepsWithAction(steps, plan.Agent)
	if err := s.applyAgents(ctx, agents); err != nil {
		return err
	}
	begun := machineNames(agents)
	names := slices.Clone(begun)
	for _, m := range stepsWithAction(steps, plan.Mark) {
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
	return s.applyMarks(ctx, names, nodes)
}

// stepsWithAction returns those of the given steps that have the given action, in the same order.
func stepsWithAction(steps []plan.Step, action plan.Action) (out []plan.Step) {
	for _, s := range steps {
		if s.Do == action {
			out = append(out, s)
		}
	}
	return out
}

func machineNames(steps []plan.Step) (out []string) {
	for _, s := range steps {
		out = append(out, s.Machine)
	}
	return out
}

func (s *Site) uploadAll(ctx context.Context, steps []plan.Step) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxUploads)
	for _, step := range steps {
		g.Go(func() error {
			for _, f := range step.Files {
				if err := s.uploadFile(ctx, step.Machine, f); err != nil {
					return fmt.Errorf("uploading %s to %s: %w", f.Name, step.Machine, err)
				}
			}
			s.Printf("%s has the release", step.Machine)
			return nil
		})
	}
	return g.Wait()
}

func (s *Site) uploadFile(ctx context.Context, name string, file plan.File) error {
	f, err := os.Open(file.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	m, err := s.connection(ctx, name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, uploadTimeout, fmt.Errorf("it took longer than %v", uploadTimeout))
	defer cancel()
	return m.WriteFile(ctx, f, file.Size, machines.Cache+"/"+file.Name, 0o600)
}

// applyReplicas installs or changes one replica after the other, and waits until each is ready. It
// changes a running replica only while the raft cluster keeps its quorum without that replica. If
// the cluster does not respond, it skips this check for the replicas for which canStartUnchecked
// returns true.
func (s *Site) applyReplicas(ctx context.Context, steps []plan.Step) error {
	var begun []string // started while the cluster does not answer; a quorum may need several
	for _, step := range steps {
		if step.Start == "" {
			_, err := s.queryMembers(ctx)
			switch {
			case err != nil && s.canStartUnchecked(step.Machine):
				if err := s.runInstaller(ctx, step, ""); err != nil {
					return err
				}
				begun = append(begun, step.Machine)
				continue
			case err != nil && len(begun) == 0:
				return fmt.Errorf("%s is not restarted: enough replicas run for the cluster to answer, and it does "+
					"not, so that nobody can tell whether the others can spare one. "+
					"See to that and run it again, or stop keelson-controlplane where it is of no use: what is "+
					"stopped is started. %w", step.Machine, err)
			}
		}
		if len(begun) > 0 {
			if err := s.awaitReplicas(ctx, begun); err != nil {
				return err
			}
			begun = nil
		}
		if step.Start == "" {
			if err := s.awaitQuorumWithout(ctx, step.Machine); err != nil {
				return err
			}
		}
		if err := s.applyReplica(ctx, step); err != nil {
			return err
		}
	}
	if len(begun) > 0 {
		return s.awaitReplicas(ctx, begun)
	}
	return nil
}

// canStartUnchecked reports whether the named replica may be started or restarted while the cluster
// does not respond. It returns true if the replica was not running when the machines were
// inspected. It also returns true if too few voters for a quorum were running, or if there is only
// one voter. In other cases, the replicas may serve although the cluster does not respond, for
// example because the administrator's kubeconfig has expired. They must then not be restarted one
// after the other without a check.
func (s *Site) canStartUnchecked(name string) bool {
	unit := machines.ControlPlane.UnitName()
	voters, run := 0, 0
	for _, h := range s.Cluster.ReplicaHosts() {
		f := s.facts[h.Name]
		if !f.ReplicaWhole || f.WithoutVote || f.Joining {
			continue
		}
		if voters++; f.Active[unit] {
			run++
		}
	}
	return !s.facts[name].Active[unit] || run < voters/2+1 || voters == 1 // no other voter needs it
}

func (s *Site) applyReplica(ctx context.Context, step plan.Step) error {
	token := ""
	if step.Start == plan.Join {
		var err error
		if token, err = s.createToken(ctx, "controlplane", step.Machine, false); err != nil {
			return fmt.Errorf("a token for %s: %w", step.Machine, err)
		}
	}
	if err := s.runInstaller(ctx, step, token); err != nil {
		return err
	}
	if step.Start == plan.Init || step.Admin {
		s.markAdmin(step.Machine)
	}
	return s.awaitReplicas(ctx, []string{step.Machine})
}

// awaitQuorumWithout waits until the raft cluster would keep its quorum without the named replica.
// It returns at once if there are fewer than three voters, because a restart then always interrupts
// the quorum. It also returns at once if the replica has no vote or is not ready.
func (s *Site) awaitQuorumWithout(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("that did not change in %v", readyTimeout))
	defer cancel()
	err := wait.For(ctx, pollInterval, func() error {
		members, err := s.queryMembers(ctx)
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
		return fmt.Errorf("%s is not restarted, because the cluster would lose its quorum: %w", name, err)
	}
	return nil
}

func (s *Site) awaitReplicas(ctx context.Context, names []string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready in %v", readyTimeout))
	defer cancel()
	standby := map[string]bool{}
	err := wait.For(ctx, pollInterval, func() error {
		members, err := s.queryMembers(ctx)
		if err != nil {
			return err
		}
		var errs []error
		for _, name := range names {
			m, ok := members[name]
			standby[name] = m.Standby
			switch {
			case !ok:
				errs = append(errs, fmt.Errorf("%s is not a member of the raft cluster yet", name))
			case !m.Voter && !m.Standby:
				errs = append(errs, fmt.Errorf("%s is catching up", name))
			case m.Ready != "yes":
				errs = append(errs, fmt.Errorf("%s: %s", name, m.Ready))
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return s.withJournal(ctx, names[0], machines.ControlPlane,
			fmt.Errorf("waiting for the replica of %s: %w", strings.Join(names, ", "), err))
	}
	for _, name := range names {
		what := "replica"
		if standby[name] {
			what = "standby"
		}
		s.Printf("%s %s is ready", what, name)
	}
	return nil
}

// applyAgents installs or changes the agents: one agent alone, then the others in parallel. A
// defect of the release or of the settings then affects only one worker. After an error, it starts
// no further installation.
func (s *Site) applyAgents(ctx context.Context, steps []plan.Step) error {
	if len(steps) > 1 {
		if err := s.applyAgent(ctx, steps[0]); err != nil {
			return err
		}
		steps = steps[1:]
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxAgents)
	for _, step := range steps {
		g.Go(func() error {
			if ctx.Err() != nil {
				return nil // another agent has failed
			}
			return s.applyAgent(ctx, step)
		})
	}
	return g.Wait()
}

func (s *Site) applyAgent(ctx context.Context, step plan.Step) error {
	token := ""
	if step.Start == plan.Join {
		var err error
		if token, err = s.createToken(ctx, "node", step.Machine, step.Replace); err != nil {
			return fmt.Errorf("a token for %s: %w", step.Machine, err)
		}
	}
	return s.runInstaller(ctx, step, token)
}

func (s *Site) createToken(ctx context.Context, role, name string, replace bool) (string, error) {
	words := []string{"cluster", "token", "create", "--role", role, "--names", name, "--ttl", "1h"}
	if replace {
		words = append(words, "--replace")
	}
	out, err := s.runKctl(ctx, apiTimeout, words...)
	if err == nil && strings.TrimSpace(out) == "" {
		err = errors.New("'kctl cluster token create' says nothing")
	}
	return strings.TrimSpace(out), err
}

// installScript is a format for a shell script that unpacks the tarball of a release in
// machines.Cache and runs its install.sh. The arguments are the SHA-256 sum of the tarball, its
// name without .tar.gz, and the arguments of install.sh. Each line of the script's input is the
// name of a file, such as the join token, and its content in base64. The content may be secret. The
// script deletes the files of other releases from machines.Cache.
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

// runInstaller carries out a step with the action ControlPlane or Agent: it runs install.sh of the
// uploaded release on the machine of the step. The argument token is the join token, or "".
func (s *Site) runInstaller(ctx context.Context, step plan.Step, token string) error {
	began := time.Now()
	input := map[string]string{"settings": step.Settings}
	words := []string{"agent", "--settings", `"$work/settings"`}
	if step.Do == plan.ControlPlane {
		words[0] = "server"
	}
	top := strings.TrimSuffix(step.Files[0].Name, ".tar.gz")
	sum := step.Files[0].Sum
	if len(step.Files) > 1 {
		// readFile verified the sum before the upload, and WriteFile uploads completely or not at
		// all.
		words = append(words, "--images", `"$PWD/`+step.Files[1].Name+`"`, "--sums", `"$work/sums"`)
		input["sums"] = step.Files[1].Sum + "  " + step.Files[1].Name + "\n"
	}
	switch step.Start {
	case plan.Init:
		words = append(words, "--init")
		for _, f := range step.Flags {
			words = append(words, "--init-flag", machines.ShellQuote(f))
		}
	case plan.Join:
		words = append(words, "--token-file", `"$work/token"`)
		input["token"] = token + "\n"
		if step.Standby {
			words = append(words, "--standby")
		}
		if step.Do == plan.ControlPlane {
			for _, a := range s.joinAddresses(step.Machine) {
				words = append(words, "--server", a)
			}
		}
	}
	if step.Admin {
		admin, err := s.adminKubeconfig(ctx, step.Machine)
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
	if _, err := s.runScript(ctx, step.Machine, installTimeout, script, strings.NewReader(in.String())); err != nil {
		return fmt.Errorf("%s: %w", step, err)
	}
	s.Printf("%s: %s: done in %.0fs", step.Machine, step, time.Since(began).Seconds())
	return nil
}

// joinAddresses returns the addresses of the replicas that the replica on the joining machine may
// contact to join the raft cluster.
func (s *Site) joinAddresses(joining string) (out []string) {
	for _, name := range s.adminMachines() {
		if h, err := s.Cluster.Host(name); err == nil && name != joining {
			out = append(out, h.Address)
		}
	}
	return out
}
