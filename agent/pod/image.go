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
)

// reasoned is an error with the waiting reason of its container.
type reasoned struct {
	reason string
	err    error
}

func (r *reasoned) Error() string { return r.err.Error() }
func (r *reasoned) Unwrap() error { return r.err }

// pullError is a failed pull. Its text omits the prefix ErrImagePull, because messages show the
// waiting reason before it.
type pullError struct{ err error }

func (e *pullError) Error() string {
	reason := agent.ErrImagePull.Error() + ": "
	return strings.ReplaceAll(strings.TrimPrefix(e.err.Error(), reason), "\n"+reason, "\n")
}

func (e *pullError) Unwrap() error { return e.err }

func imageReason(err error) (reason, message string) {
	var r *reasoned
	if errors.As(err, &r) {
		return r.reason, r.err.Error()
	}
	return "ErrImagePull", err.Error()
}

func startReason(err error) (reason, message string) {
	var r *reasoned
	if errors.As(err, &r) {
		return r.reason, r.err.Error()
	}
	return "RunContainerError", err.Error()
}

// pullPolicy returns the container's pull policy. The default is Always for the tag latest or no
// tag, else IfNotPresent.
func pullPolicy(c *v1.Container) v1.PullPolicy {
	if c.ImagePullPolicy != "" {
		return c.ImagePullPolicy
	}
	name := c.Image[strings.LastIndexByte(c.Image, '/')+1:]
	if _, tag, ok := strings.Cut(name, ":"); !strings.Contains(name, "@") && (!ok || tag == "latest") {
		return v1.PullAlways
	}
	return v1.PullIfNotPresent
}

// ensureImage finds the image of a container on the node, or pulls it, as the pull policy requires.
func (w *worker) ensureImage(ctx context.Context, a Action) error {
	start, pod := w.cfg.now(), w.podWithStatus()
	spec := containerSpec(pod, a.Container)
	if spec == nil {
		return fmt.Errorf("pod %s/%s has no container %q", pod.Namespace, pod.Name, a.Container)
	}
	field := fieldPath(pod, a.Container)
	ref, size, err := w.present(ctx, spec.Image)
	if err != nil {
		return w.imageFailed(ctx, pod, spec, field, err)
	}
	policy := pullPolicy(spec)
	detail := "present"
	switch {
	case ref != "" && policy != v1.PullAlways:
		w.events.event(pod, field, v1.EventTypeNormal, "Pulled", fmt.Sprintf("Container image %q already present on machine", spec.Image))
	case policy == v1.PullNever:
		err := &reasoned{"ErrImageNeverPull", fmt.Errorf("Container image %q is not present with pull policy of Never", spec.Image)}
		w.events.event(pod, field, v1.EventTypeWarning, "ErrImageNeverPull", err.Error())
		w.events.event(pod, field, v1.EventTypeWarning, "Failed", "Error: ErrImageNeverPull")
		return err
	default:
		w.events.event(pod, field, v1.EventTypeNormal, "Pulling", fmt.Sprintf("Pulling image %q", spec.Image))
		pulled, err := w.pull(ctx, pod, spec.Image)
		if err != nil {
			return w.imageFailed(ctx, pod, spec, field, err)
		}
		// PullImage returns the pulled reference, but containers are created from the image store's
		// ID.
		if ref, size, err = w.present(ctx, spec.Image); err != nil || ref == "" {
			ref = pulled
		}
		took := w.cfg.now().Sub(start).Round(time.Millisecond)
		w.events.event(pod, field, v1.EventTypeNormal, "Pulled", fmt.Sprintf("Successfully pulled image %q in %s (%s including waiting). Image size: %d bytes.", spec.Image, took, took, size))
		detail = "pulled"
	}
	w.mu.Lock()
	w.o.Images[a.Container] = Image{Ref: ref, Attempt: a.Attempt}
	w.mu.Unlock()
	if a.Attempt == 0 {
		w.stage(agent.StageTime{Name: "image", Start: start, Duration: w.cfg.now().Sub(start), Detail: spec.Image + " " + detail})
	}
	return nil
}

func (w *worker) present(ctx context.Context, image string) (ref string, size uint64, err error) {
	res, err := w.cfg.Images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: image}})
	if err != nil {
		return "", 0, err
	}
	return res.GetImage().GetId(), res.GetImage().GetSize(), nil
}

// pull tries the matching credentials in order. It pulls anonymously only if none exist.
func (w *worker) pull(ctx context.Context, pod *v1.Pod, image string) (string, error) {
	logins := credentials(w.cfg.Objects, pod, image)
	if len(logins) == 0 {
		logins = append(logins, nil)
	}
	var errs []error
	for _, auth := range logins {
		res, err := w.cfg.Images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: image, UserSpecifiedImage: image}, Auth: auth})
		if err == nil {
			return res.ImageRef, nil
		}
		errs = append(errs, err)
	}
	return "", errors.Join(errs...)
}

func (w *worker) imageFailed(ctx context.Context, pod *v1.Pod, spec *v1.Container, field string, err error) error {
	if ctx.Err() != nil {
		return err
	}
	if errors.Is(err, agent.ErrInvalidImage) {
		msg := fmt.Sprintf("Failed to apply default image tag %q: %v", spec.Image, err)
		w.events.event(pod, field, v1.EventTypeWarning, "InspectFailed", msg)
		w.events.event(pod, field, v1.EventTypeWarning, "Failed", "Error: InvalidImageName")
		return &reasoned{"InvalidImageName", errors.New(msg)}
	}
	err = &pullError{err}
	w.events.event(pod, field, v1.EventTypeWarning, "Failed", fmt.Sprintf("Failed to pull image %q: %v", spec.Image, err))
	w.events.event(pod, field, v1.EventTypeWarning, "Failed", "Error: ErrImagePull")
	w.events.event(pod, field, v1.EventTypeNormal, "BackOff", fmt.Sprintf("Back-off pulling image %q", spec.Image))
	return &reasoned{"ErrImagePull", err}
}
