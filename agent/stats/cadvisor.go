package stats

import (
	"context"
	"io"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/promtext"
)

// sandboxImage is the image label of a pod's sandbox: the program that holds its namespaces. It is
// no image of a registry. Dashboards select network metrics by a label that is not empty.
const sandboxImage = "keelson-pause"

// subject is a cgroup whose metrics are in the response of /metrics/cadvisor.
type subject struct {
	labels  promtext.Labels
	at      time.Time // time of the measurement
	usage   *agent.Usage
	details *agent.CgroupDetails
	started time.Time // zero = unknown
	network []agent.InterfaceUsage
	disk    *diskUse // nil = unknown
}

// diskUse is the usage of the file system on a block device.
type diskUse struct {
	device        string
	used          uint64 // bytes
	size          *agent.Disk
	ofWholeDevice bool // the usage is that of the whole file system
}

// noUsage and noDetails are the values of a subject that has only network metrics.
var (
	noUsage   agent.Usage
	noDetails agent.CgroupDetails
)

// Cadvisor writes the response of /metrics/cadvisor to output, with the names and labels of
// cAdvisor's metrics in the kubelet. As there, the network metrics of a pod have the labels of its
// sandbox. A failed measurement is reported in the metric container_scrape_error. The returned
// error is a write error.
func (s *Source) Cadvisor(ctx context.Context, output io.Writer) error {
	sample, err := s.sampleWithDetails(ctx)
	w := promtext.NewWriter(output)
	if sample != nil && sample.Details != nil {
		writeSubjects(w, s.subjects(sample))
		s.writeMachine(w, sample)
	}
	failed := 0.0
	if err != nil {
		failed = 1
	}
	writeGauge(w, "container_scrape_error", "1 if some container metrics could not be read, 0 otherwise.", failed)
	writeGauge(w, "machine_scrape_error", "1 if the metrics of the machine could not be read, 0 otherwise.", failed)
	return w.Flush()
}

func writeSubjects(w *promtext.Writer, subjects []subject) {
	var current *subject
	var at time.Time
	put := func(value float64, pairs ...string) { w.WriteSample(value, at, current.labels, pairs...) }
	for i := range cadvisorFamilies {
		f := &cadvisorFamilies[i]
		w.StartFamily(f.name, f.kind, f.help)
		for j := range subjects {
			current = &subjects[j]
			if at = current.at; f.untimed {
				at = time.Time{}
			}
			f.write(current, put)
		}
	}
}

// writeMachine writes the capacity of the node.
func (s *Source) writeMachine(w *promtext.Writer, sample *Sample) {
	m := &s.cfg.Machine
	labels := []string{"boot_id", m.BootID, "machine_id", m.MachineID, "system_uuid", m.SystemUUID}
	writeGauge(w, "machine_cpu_cores", "Number of logical CPUs of the node.", m.CPUs, labels...)
	writeGauge(w, "machine_memory_bytes", "Memory of the node in bytes.", float64(sample.Node.Limit), labels...)
	if sample.Node.HasSwapLimit {
		writeGauge(w, "machine_swap_bytes", "Swap space of the node in bytes.", float64(sample.Node.SwapLimit),
			labels...)
	}
}

// subjects returns the cgroups of a sample: the node, the root of all pods, and each pod, sandbox
// and container.
func (s *Source) subjects(sample *Sample) []subject {
	storage, device := s.readStorage(), ""
	if storage.disk != nil {
		device = s.cfg.DiskDevice()
	}
	d := sample.Details
	node := subject{labels: subjectLabels("", "/", "", "", "", ""), usage: &sample.Node, details: &d.Machine,
		network: d.MachineNetwork}
	if s.cfg.Share {
		node.details = &d.Root
	}
	if disk := storage.disk; disk != nil {
		node.disk = &diskUse{device: device, used: disk.Capacity - min(disk.Capacity, disk.Available),
			size: disk, ofWholeDevice: true}
	}
	node.at = sample.Node.At
	all := []subject{node, {labels: subjectLabels("", d.Root.Path, "", "", "", ""), at: sample.Root.At,
		usage: &sample.Root, details: &d.Root}}
	for i := range sample.Pods {
		p, details := &sample.Pods[i], &d.Pods[i]
		all = append(all,
			subject{labels: subjectLabels("", details.Path, "", "", p.Namespace, p.Name), at: p.At, usage: &p.Usage,
				details: &details.CgroupDetails, started: p.Started},
			subject{labels: subjectLabels("", details.Path, sandboxImage, details.SandboxID, p.Namespace, p.Name),
				at: p.At, usage: &noUsage, details: &noDetails, network: p.Network})
		for j := range p.Containers {
			c, details := &p.Containers[j], &details.Containers[j]
			one := subject{labels: subjectLabels(c.Name, details.Path, details.Image, details.ID, p.Namespace, p.Name),
				at: c.At, usage: &c.Usage, details: &details.CgroupDetails, started: c.Started}
			if n, ok := storage.containerLayer(p.UID, c.Name); ok {
				one.disk = &diskUse{device: device, used: n, size: storage.disk}
			}
			all = append(all, one)
		}
	}
	return all
}

// subjectLabels returns the labels of all metrics of a subject. As in cAdvisor, unknown labels are
// empty.
func subjectLabels(container, id, image, name, namespace, pod string) promtext.Labels {
	return promtext.FormatLabels("container", container, "id", id, "image", image, "name", name, "namespace", namespace,
		"pod", pod)
}

// containerLayer returns the bytes in the writable layer of a container, and false if they or the
// node's file system are not measured.
func (s podStorage) containerLayer(uid types.UID, name string) (uint64, bool) {
	p, ok := s.pods[uid]
	if !ok || p.At.IsZero() || s.disk == nil {
		return 0, false
	}
	c, ok := p.Containers[name]
	return c.Layer, ok
}
