package kctl

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

// openLab returns the running lab of this machine. If no lab is running, it returns an error with
// the reason.
func openLab(streams genericiooptions.IOStreams) (*lab.Lab, error) {
	found, err := lab.FindLab(streams.Out)
	if err == nil {
		err = found.StateError()
	}
	return found.Lab, err
}

// startLab creates the lab wanted if no lab exists. It starts an existing lab that is down, or
// prints the status of a running lab. A lab that was created or deleted only in part is recreated.
// It fails if a flag in flags differs from the value in the existing lab.
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

// rebuildReason returns the reason why the existing lab f must be deleted and created again, or "".
func rebuildReason(f lab.Found) string {
	switch {
	case f.State == lab.Unfinished:
		return "what built it or took it away was cut off"
	case f.State == lab.Down && f.Test && !f.Lab.Config.Maker.IsAlive():
		return "it is down, and the run of tests that made it has ended"
	}
	return ""
}

// checkUnchangedFlags returns an error if a flag that the user has set differs from the
// configuration of the existing lab. is is that configuration, and want is the requested
// configuration.
func checkUnchangedFlags(is, want lab.Config, flags *pflag.FlagSet) error {
	for _, f := range []struct {
		name     string
		is, want any
	}{
		{"control-planes", is.ControlPlanes, want.ControlPlanes},
		{"standbys", is.Standbys, want.Standbys},
		{"workers", is.Workers, want.Workers},
		{"listen", is.Listen, want.Listen},
		{"bin-dir", filepath.Clean(is.BinDir), want.BinDir},
		{"cni-bin-dir", filepath.Clean(is.CNIBinDir), want.CNIBinDir},
		{"image-dir", filepath.Clean(is.ImageDir), want.ImageDir},
		{"cpu", is.CPU, want.CPU},
		{"links", max(1, is.Links), want.Links},
		{"families", cmp.Or(is.Families, lab.FamilyIPv4), want.Families},
		{"pod-network", cmp.Or(is.PodNetwork, "auto"), want.PodNetwork},
		{"memory", is.Memory, want.Memory},
		{"eviction-seconds", is.EvictionSeconds, want.EvictionSeconds},
		{"control-plane-files", is.ControlPlaneFiles, want.ControlPlaneFiles},
		{"kubeconfig-out", filepath.Clean(is.Kubeconfig), want.Kubeconfig},
	} {
		if flags.Changed(f.name) && f.is != f.want {
			return changedFlagError(f.name, f.is, f.want)
		}
	}
	if name := "control-plane-flag"; flags.Changed(name) && !slices.Equal(is.ControlPlaneFlags, want.ControlPlaneFlags) {
		return changedFlagError(name, is.ControlPlaneFlags, want.ControlPlaneFlags)
	}
	return nil
}

func changedFlagError(name string, is, want any) error {
	return fmt.Errorf("lab: the existing lab was created with --%s %v, not %v: leave out the flag, or delete the lab first "+
		"with 'kctl lab down'", name, is, want)
}
