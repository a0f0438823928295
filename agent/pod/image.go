package pod

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// waitingError is an error with the reason that the status of its waiting container shows.
type waitingError struct {
	reason string
	err    error
}

func (r *waitingError) Error() string { return r.err.Error() }
func (r *waitingError) Unwrap() error { return r.err }

// pullError is a failed pull. Its text omits the prefix ErrImagePull, because messages show the
// waiting reason before it.
type pullError struct{ err error }

func (e *pullError) Error() string {
	reason := agent.ErrImagePull.Error() + ": "
	return strings.ReplaceAll(strings.TrimPrefix(e.err.Error(), reason), "\n"+reason, "\n")
}

func (e *pullError) Unwrap() error { return e.err }

func imageFailureReason(err error) (reason, message string) {
	var r *waitingError
	if errors.As(err, &r) {
		return r.reason, r.err.Error()
	}
	return "ErrImagePull", err.Error()
}

func startFailureReason(err error) (reason, message string) {
	var r *waitingError
	if errors.As(err, &r) {
		return r.reason, r.err.Error()
	}
	return "RunContainerError", err.Error()
}

// pullPolicy returns the container's pull policy. The default is Always for an image with the tag
// latest or without a tag, and IfNotPresent otherwise.
func pullPolicy(spec *v1.Container) v1.PullPolicy {
	if spec.ImagePullPolicy != "" {
		return spec.ImagePullPolicy
	}
	name := spec.Image[strings.LastIndexByte(spec.Image, '/')+1:]
	if _, tag, ok := strings.Cut(name, ":"); !strings.Contains(name, "@") && (!ok || tag == "latest") {
		return v1.PullAlways
	}
	return v1.PullIfNotPresent
}

// ensureImage finds the image of a container on the node, or pulls it, as the pull policy requires.
func (ar *actionRunner) ensureImage(ctx context.Context, action lifecycle.Action) error {
	start, pod := ar.w.cfg.currentTime(), ar.w.podWithStatus()
	spec := lifecycle.FindContainerSpec(pod, action.Container)
	if spec == nil {
		return fmt.Errorf("pod %s/%s has no container %q", pod.Namespace, pod.Name, action.Container)
	}
	if err := ar.checkEphemeral(pod, spec); err != nil {
		return err
	}
	field := containerFieldPath(pod, action.Container)
	ref, size, err := ar.findImage(ctx, spec.Image)
	if err != nil {
		return ar.reportImageFailure(ctx, pod, spec, field, err)
	}
	policy := pullPolicy(spec)
	detail := "present"
	switch {
	case ref != "" && policy != v1.PullAlways:
		ar.w.events.Emit(pod, field, v1.EventTypeNormal,
			"Pulled", fmt.Sprintf("Container image %q already present on machine", spec.Image))
	case policy == v1.PullNever:
		err := &waitingError{"ErrImageNeverPull",
			fmt.Errorf("Container image %q is not present with pull policy of Never", spec.Image)}
		ar.w.events.Emit(pod, field, v1.EventTypeWarning, "ErrImageNeverPull", err.Error())
		ar.w.events.Emit(pod, field, v1.EventTypeWarning, "Failed", "Error: ErrImageNeverPull")
		return err
	default:
		ar.w.events.Emit(pod, field, v1.EventTypeNormal, "Pulling", fmt.Sprintf("Pulling image %q", spec.Image))
		pulled, err := ar.pullImage(ctx, pod, spec.Image)
		if err != nil {
			return ar.reportImageFailure(ctx, pod, spec, field, err)
		}
		// PullImage returns the pulled reference, but containers are created from the image store's
		// ID.
		if ref, size, err = ar.findImage(ctx, spec.Image); err != nil || ref == "" {
			ref = pulled
		}
		duration := ar.w.cfg.currentTime().Sub(start).Round(time.Millisecond)
		ar.w.events.Emit(pod, field, v1.EventTypeNormal,
			"Pulled", fmt.Sprintf("Successfully pulled image %q in %s (%s including waiting). Image size: %d bytes.",
				spec.Image, duration, duration, size))
		detail = "pulled"
	}
	ar.w.mu.Lock()
	ar.w.observed.Images[action.Container] = lifecycle.Image{Ref: ref, Attempt: action.Attempt}
	ar.w.mu.Unlock()
	if action.Attempt == 0 {
		ar.w.status.reportStage(agent.StageTime{Name: "image", Start: start,
			Duration: ar.w.cfg.currentTime().Sub(start), Detail: spec.Image + " " + detail})
	}
	return nil
}

func (ar *actionRunner) findImage(ctx context.Context, image string) (ref string, size uint64, err error) {
	res, err := ar.w.cfg.Deps.Images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: image}})
	if err != nil {
		return "", 0, err
	}
	return res.GetImage().GetId(), res.GetImage().GetSize(), nil
}

// pullImage pulls an image and returns its reference. It tries the credentials that match the image
// in order, and pulls anonymously only if no credentials match.
func (ar *actionRunner) pullImage(ctx context.Context, pod *v1.Pod, image string) (string, error) {
	logins := pullCredentials(ar.w.cfg.Deps.Objects, pod, image)
	if len(logins) == 0 {
		logins = append(logins, nil)
	}
	var errs []error
	for _, auth := range logins {
		res, err := ar.w.cfg.Deps.Images.PullImage(ctx,
			&cri.PullImageRequest{Image: &cri.ImageSpec{Image: image, UserSpecifiedImage: image}, Auth: auth})
		if err == nil {
			return res.ImageRef, nil
		}
		errs = append(errs, err)
	}
	return "", errors.Join(errs...)
}

func (ar *actionRunner) reportImageFailure(ctx context.Context, pod *v1.Pod, spec *v1.Container, field string,
	err error) error {
	if ctx.Err() != nil {
		return err
	}
	if errors.Is(err, agent.ErrInvalidImage) {
		msg := fmt.Sprintf("Failed to apply default image tag %q: %v", spec.Image, err)
		ar.w.events.Emit(pod, field, v1.EventTypeWarning, "InspectFailed", msg)
		ar.w.events.Emit(pod, field, v1.EventTypeWarning, "Failed", "Error: InvalidImageName")
		return &waitingError{"InvalidImageName", errors.New(msg)}
	}
	err = &pullError{err}
	ar.w.events.Emit(pod, field, v1.EventTypeWarning, "Failed",
		fmt.Sprintf("Failed to pull image %q: %v", spec.Image, err))
	ar.w.events.Emit(pod, field, v1.EventTypeWarning, "Failed", "Error: ErrImagePull")
	ar.w.events.Emit(pod, field, v1.EventTypeNormal, "BackOff", fmt.Sprintf("Back-off pulling image %q", spec.Image))
	return &waitingError{"ErrImagePull", err}
}
