package pod

import (
	"context"
	"errors"
	"strconv"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/podfiles"
)

func (ps *podStorage) mountVolumes(ctx context.Context) error {
	start, pod := ps.w.cfg.currentTime(), ps.w.podWithStatus()
	// the pod's own status contains the names of its generated claims
	devices, err := ps.w.cfg.Deps.Devices.Prepare(ctx, ps.w.desiredPod())
	if err != nil {
		if ctx.Err() == nil {
			ps.w.events.Emit(pod, "", v1.EventTypeWarning,
				"FailedPrepareDynamicResources", "Failed to prepare dynamic resources: "+err.Error())
		}
		return err
	}
	mounts, err := ps.w.cfg.Deps.Volumes.MountAll(ctx, pod)
	if err != nil {
		if ctx.Err() == nil {
			ps.w.events.Emit(pod, "", v1.EventTypeWarning, "FailedMount", err.Error())
		}
		return err
	}
	ps.w.mu.Lock()
	ps.mounts, ps.devices = mounts, devices
	ps.w.mu.Unlock()
	ps.w.status.reportStage(agent.StageTime{Name: "volumes", Start: start, Duration: ps.w.cfg.currentTime().Sub(start),
		Detail: strconv.Itoa(len(mounts))})
	return nil
}

func (ps *podStorage) unmountVolumes(ctx context.Context) error {
	pod := ps.w.desiredPod() // its status contains the names of its generated claims
	uid := pod.UID
	dir := podfiles.PodDirectory(ps.w.cfg.Paths, uid)
	if !podfiles.HasNoSubPaths(dir) {
		if err := ps.w.cfg.Containers.SubPaths.Release(dir); err != nil {
			return err
		}
	}
	// call both, so that neither waits for the other's driver
	err := errors.Join(ps.releaseDevices(ctx, pod), ps.releaseVolumes(ctx, pod))
	if ps.w.cfg.Deps.Plugins != nil {
		err = errors.Join(err, ps.w.cfg.Deps.Plugins.Release(uid))
	}
	if err != nil {
		return err
	}
	ps.w.mu.Lock()
	ps.mounts, ps.devices = nil, nil
	ps.w.mu.Unlock()
	return nil
}

// releaseVolumes unmounts the pod's volumes. If a volume cannot be unmounted, it returns an error
// and emits an event that names the volume. The pod then stays on the node.
func (ps *podStorage) releaseVolumes(ctx context.Context, pod *v1.Pod) error {
	err := ps.w.cfg.Deps.Volumes.UnmountAll(ctx, pod.UID)
	if err != nil && ctx.Err() == nil {
		ps.w.events.Emit(pod, "", v1.EventTypeWarning, "FailedUnMount", err.Error()) // the kubelet's reason
	}
	return err
}

// releaseDevices releases the devices of the pod's claims. If their record cannot be read, it
// returns an error and emits an event. The pod then stays on the node until an administrator
// repairs the record.
func (ps *podStorage) releaseDevices(ctx context.Context, pod *v1.Pod) error {
	err := ps.w.cfg.Deps.Devices.Release(ctx, pod)
	if errors.Is(err, agent.ErrDamagedRecord) {
		ps.w.events.Emit(pod, "", v1.EventTypeWarning, "FailedUnprepareDynamicResources",
			"Failed to unprepare dynamic resources: "+err.Error())
	}
	return err
}
