package procfs

import (
	"os"
	"os/exec"
	"testing"

	"keelson.dev/keelson/test/bench/figures"
)

func TestStatFieldsOfAnOddName(t *testing.T) {
	f, err := parseStatFields([]byte("12 (a) b) (c) S 7 1 1 0 -1 4194304 1 2 3 4 250 50 0 0 20 0"))
	if err != nil || f[0] != "S" || f[1] != "7" || f[11] != "250" || f[12] != "50" {
		t.Errorf("got %q, %v", f, err)
	}
	if _, err := parseStatFields([]byte("12 (a) S 7")); err == nil {
		t.Error("a short line causes no error")
	}
}

func TestHostTimes(t *testing.T) {
	busy, total, err := parseHostTimes("cpu  10 20 30 400 50 6 7 8 1000 2000")
	if err != nil || busy != 10+20+30+6+7+8 || total != busy+450 {
		t.Errorf("busy %v, total %v, %v", busy, total, err)
	}
	if _, _, err := parseHostTimes("intr 5"); err == nil {
		t.Error("another line causes no error")
	}
}

func TestKilobytes(t *testing.T) {
	status := []byte("Name:\tx\nVmRSS:\t  999 kB\nRssAnon:\t     100 kB\nRssFile:\t       4 kB\n")
	if v, err := parseKilobytes(status, "RssAnon:"); err != nil || v != 100*1024 {
		t.Errorf("got %v, %v", v, err)
	}
	if _, err := parseKilobytes(status, "Rss:"); err == nil {
		t.Error("an absent line causes no error")
	}
}

func TestInGroup(t *testing.T) {
	v1 := "5:memory:/keelson-lab/w1/system\n4:cpu,cpuacct:/keelson-lab/w1/system\n"
	for path, want := range map[string]bool{
		"/keelson-lab/w1": true, "/keelson-lab/w1/system": true, "/keelson-lab/w": false, "/keelson-lab/w1/sys": false,
		"/keelson-lab/w10": false,
	} {
		if got := isInCgroup(v1, path); got != want {
			t.Errorf("%s: %v", path, got)
		}
	}
	if !isInCgroup("0::/keelson-lab/w1/pod:x\n", "/keelson-lab/w1/pod:x") {
		t.Error("a colon in a path")
	}
}

func TestOthers(t *testing.T) {
	cpu := map[string]float64{Self: 1, "lab": 3, "w1": 2} // w1 is in the lab
	if got := otherWorkShare(cpu, []string{"lab"}, 900, 2000); got != 0.25 {
		t.Errorf("of 9 busy seconds in 20, 4 are ours: got %v, want 0.25", got)
	}
	if got := otherWorkShare(cpu, []string{"lab"}, 300, 2000); got != 0 {
		t.Errorf("ticks are coarse, but a share is never below zero: %v", got)
	}
}

// The meter measures the CPU time of a child process with a busy loop.
func TestMeterSeesAChild(t *testing.T) {
	child := exec.Command("sh", "-c", "read line; i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo; read line")
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close(); _ = child.Wait() }()
	m := Meter{Processes: map[string]int{"child": child.Process.Pid, "missing": -1}}
	var r figures.Record
	err = m.Run(&r, func() error {
		if _, err := in.Write([]byte("go\n")); err != nil {
			return err
		}
		_, err := out.Read(make([]byte, 1))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if r.CPU["child"] <= 0 || r.Busy <= 0 || r.Busy > 1 {
		t.Errorf("record %+v", r)
	}
	if _, ok := r.CPU["missing"]; ok {
		t.Error("a process that never existed has a figure")
	}
	mem, err := ReadMemory(child.Process.Pid)
	if err != nil || mem.Anonymous <= 0 || mem.File <= 0 {
		t.Errorf("memory %+v, %v", mem, err)
	}
	if pss, err := PSS(os.Getpid()); err != nil || pss <= 0 {
		t.Errorf("PSS of this process: %v, %v", pss, err)
	}
}
