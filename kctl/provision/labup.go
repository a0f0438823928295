package provision

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"keelson.dev/keelson/deploy/lab"
)

// openLab returns the lab that $KEELSON_LAB selects on this machine, if it is running. Otherwise it
// returns an error with the reason.
func openLab(streams genericiooptions.IOStreams) (*lab.Lab, error) {
	found, err := lab.FindLab(streams.Out)
	if err == nil {
		err = found.StateError()
	}
	return found.Lab, err
}

// startLab creates the lab wanted if this machine has no such lab. It starts an existing lab that
// is down, or prints the status of a running lab. A lab that was created or deleted only in part is
// recreated. startLab fails if the user has set a flag in flags to another value than the existing
// lab has.
func startLab(ctx context.Context, out io.Writer, wanted *lab.Lab, flags *pflag.FlagSet) error {
	found, err := lab.FindLab(out)
	if err != nil {
		return err
	}
	if err := found.BusyError(); err != nil {
		return err
	}
	if why := rebuildReason(found); why != "" {
		fmt.Fprintf(out, "taking away the lab that is there: %s\n", why)
		down, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := found.Lab.Down(down); err != nil {
			return err
		}
		found = lab.Found{}
	}
	if found.State == lab.NoLab {
		if !flags.Changed("listen") {
			if wanted.Config.Listen, err = lab.FreeListen(); err != nil {
				return err
			}
		}
		return wanted.Up(ctx)
	}
	if err := checkUnchangedFlags(found.Lab.Config, wanted.Config, flags); err != nil {
		return err
	}
	if found.State == lab.Down {
		fmt.Fprintln(out, "the lab that was there is down: starting it again from the disks of its hosts")
		return found.Lab.StartAgain(ctx)
	}
	if !found.Lab.ForwarderRuns() {
		fmt.Fprintf(out, "what leads to the API at %s has ended: starting it again\n", found.Lab.Config.Listen)
		if err := found.Lab.RestartForwarder(ctx); err != nil {
			return err
		}
	}
	fmt.Fprintln(out, "the lab is up already:")
	return lab.PrintStatus(out, found.Lab.Status(ctx))
}

// rebuildReason returns the reason why the existing lab f must be deleted and created again. It
// returns "" if f can be used.
func rebuildReason(f lab.Found) string {
	switch {
	case f.State == lab.Unfinished:
		return "what built it or took it away was cut off"
	case f.State == lab.Down && f.Test && !f.Lab.Config.Maker.IsAlive():
		return "it is down, and the run of tests that made it has ended"
	}
	return ""
}

// checkUnchangedFlags returns an error if the user has set a flag in flags to another value than
// the existing lab has. current is the configuration of the existing lab. wanted is the
// configuration that the flags request.
func checkUnchangedFlags(current, wanted lab.Config, flags *pflag.FlagSet) error {
	for _, f := range []struct {
		name     string
		is, want any
	}{
		{"control-planes", current.ControlPlanes, wanted.ControlPlanes},
		{"standbys", current.Standbys, wanted.Standbys},
		{"workers", current.Workers, wanted.Workers},
		{"listen", current.Listen, wanted.Listen},
		{"bin-dir", filepath.Clean(current.BinDir), wanted.BinDir},
		{"cni-bin-dir", filepath.Clean(current.CNIBinDir), wanted.CNIBinDir},
		{"image-dir", filepath.Clean(current.ImageDir), wanted.ImageDir},
		{"cpu", current.CPU, wanted.CPU},
		{"links", max(1, current.Links), wanted.Links},
		{"families", cmp.Or(current.Families, lab.FamilyIPv4), wanted.Families},
		{"pod-network", cmp.Or(current.PodNetwork, "auto"), wanted.PodNetwork},
		{"memory", current.Memory, wanted.Memory},
		{"eviction-seconds", current.EvictionSeconds, wanted.EvictionSeconds},
		{"control-plane-files", current.ControlPlaneFiles, wanted.ControlPlaneFiles},
		{"kubeconfig-out", filepath.Clean(current.Kubeconfig), wanted.Kubeconfig},
	} {
		if flags.Changed(f.name) && f.is != f.want {
			return changedFlagError(f.name, f.is, f.want)
		}
	}
	if name := "control-plane-flag"; flags.Changed(name) &&
		!slices.Equal(current.ControlPlaneFlags, wanted.ControlPlaneFlags) {
		return changedFlagError(name, current.ControlPlaneFlags, wanted.ControlPlaneFlags)
	}
	return nil
}

func changedFlagError(name string, is, want any) error {
	return fmt.Errorf("lab: the existing lab was created with --%s %v, not %v: leave out the flag, or "+
		"delete the lab first "+
		"with 'kctl lab down'", name, is, want)
}
