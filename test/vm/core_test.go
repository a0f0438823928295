package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// core is a pod with limits, a claim of the default class, and a process that does not end when it is asked to.
const core = `apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 32Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: core}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: keelson.dev/tools:v1
    command: [/bin/sh, -c, "trap '' TERM; echo begun; while true; do sleep 1; done"]
    resources: {requests: {cpu: 50m, memory: 16Mi}, limits: {cpu: 100m, memory: 32Mi}}
    volumeMounts: [{name: data, mountPath: /data}]
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: data}}
`

// apply has the cluster take a manifest.
func (c *cluster) apply(name, manifest string) error {
	file := filepath.Join(c.TempDir(), name+".yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		return err
	}
	_, err := c.kctl("apply", "-f", file)
	return err
}

// says waits until a command of kctl says something. One that fails is asked again.
func (c *cluster) says(want string, args ...string) error {
	return until(func() error {
		out, err := c.kctl(args...)
		if err == nil && !strings.Contains(out, want) {
			err = fmt.Errorf("kctl %s says %q, want %q", strings.Join(args, " "), out, want)
		}
		return err
	})
}

// core does with one pod what a person does: its claim, its log, a command in it, a Service by its name.
func (c *cluster) core() error {
	if err := c.apply("core", core); err != nil {
		return err
	}
	return errors.Join(
		c.says("True", "get", "pod", "core", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`),
		c.says("standard Bound", "get", "pvc", "data", "-o", "jsonpath={.spec.storageClassName} {.status.phase}"),
		c.says("begun", "logs", "core"),
		c.says("kept", "exec", "core", "--", "sh", "-c", "echo kept >/data/file && sync && cat /data/file"),
		c.says("Hello from Keelson", "exec", "core", "--", "wget", "-q", "-O-", "http://hello/"),
	)
}

// limits reads what the kernel was told, and has a container ask for more than it may have.
func (c *cluster) limits() error {
	m := c.all["w1"]
	out, err := m.run(`cd /sys/fs/cgroup/keelson.slice/pods/kubepods/burstable && for d in pod*/*/; do cat $d/memory.max $d/memory.oom.group $d/cpu.weight; done | sort | uniq -c | tr -s ' \n' ' '`)
	if err != nil {
		return err
	}
	if !strings.Contains(out, "3 67108864") || !strings.Contains(out, "4 1 ") {
		return fmt.Errorf("memory.max, memory.oom.group and cpu.weight of the example's containers, with how often: %s: want 67108864 three times, and 1 four times", out)
	}
	group, err := c.group("core")
	if err != nil {
		return err
	}
	out, err = m.run("cat " + group + "/*/cpu.max " + group + "/*/memory.max | sort -u | tr '\\n' ' '")
	if err != nil || !strings.Contains(out, "10000 100000") || !strings.Contains(out, "33554432") {
		return fmt.Errorf("cpu.max and memory.max of the pod core: %s: want 10000 100000 and 33554432 (%w)", out, err)
	}
	if err := c.apply("hog", `apiVersion: v1
kind: Pod
metadata: {name: hog}
spec:
  restartPolicy: Never
  containers:
  - name: hog
    image: keelson.dev/tools:v1
    command: [/bin/sh, -c, "x=x; while true; do x=$x$x; done"]
    resources: {limits: {memory: 32Mi}}
`); err != nil {
		return err
	}
	return c.says("OOMKilled", "get", "pod", "hog", "-o", "jsonpath={.status.containerStatuses[0].state.terminated.reason}")
}

// group is the folder of a pod's control group on the worker.
func (c *cluster) group(pod string) (string, error) {
	uid, err := c.kctl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
	if err != nil {
		return "", err
	}
	out, err := c.all["w1"].run("find /sys/fs/cgroup/keelson.slice -type d -name 'pod*" + uid + "*'")
	if err == nil && (out == "" || strings.Contains(out, "\n")) {
		err = fmt.Errorf("control groups of pod %s: %q, want one", pod, out)
	}
	return out, err
}

// kill has pods go that do not go by themselves: one whose process takes no notice of SIGTERM, and one that is frozen.
func (c *cluster) kill() error {
	m := c.all["w1"]
	for _, name := range []string{"deaf", "frozen"} {
		if err := c.apply(name, `apiVersion: v1
kind: Pod
metadata: {name: `+name+`}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: keelson.dev/tools:v1
    command: [/bin/sh, -c, "trap '' TERM; while true; do sleep 1; done"]
`); err != nil {
			return err
		}
		if err := c.says("True", "get", "pod", name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`); err != nil {
			return err
		}
		group, err := c.group(name)
		if err != nil {
			return err
		}
		if name == "frozen" {
			if err := until(func() error {
				_, err := m.run("echo 1 >" + group + "/cgroup.freeze; grep -x 'frozen 1' " + group + "/cgroup.events")
				return err
			}); err != nil {
				return err
			}
		}
		if _, err := c.kctlFor(soon, "", "delete", "pod", name, "--server="+c.server()); err != nil {
			return err
		}
		if err := until(func() error {
			_, err := m.run("! test -e " + group)
			return err
		}); err != nil {
			return fmt.Errorf("the control group of pod %s: %w", name, err)
		}
	}
	return nil
}
